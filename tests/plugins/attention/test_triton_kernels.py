"""Kernels that the interpreter runs are compiled for Hopper as well, where no GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("triton_compile.py")],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert set(found) == {"decode", "gather", "tiles"}
    assert max(found.values()) <= 64, found
