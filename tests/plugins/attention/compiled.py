"""What programs beside this one, which compile kernels for Hopper, say of machine code; they import it by its name."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton


def stack(cubin: bytes) -> int:
    """Bytes of stack a thread, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", report.stdout + report.stderr)
    assert found, report
    return int(found[1])
