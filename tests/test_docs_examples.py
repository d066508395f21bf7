"""The Python examples of the README and of docs/offline.md run as they stand, on the packaged model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SAID = ("The capital of France is Paris", "four, five, six, seven", "Hello", " km")
"""What the model writes somewhere in the examples that are greedy."""


@pytest.mark.slow
def test_the_examples_run(tmp_path: Path) -> None:
    pages = [(ROOT / page).read_text() for page in ("README.md", "docs/offline.md")]
    examples = [code for page in pages for code in re.findall(r"```python\n(.*?)```", page, re.DOTALL)]
    ours = [code for code in examples if re.search(r"^from engine import .*LLM", code, re.MULTILINE)]
    assert len(ours) == 3
    program = [sys.executable, "-c", "\n".join(ours)]  # one program, since importing torch is what takes longest
    calm = {**os.environ, "GOMP_SPINCOUNT": "1000"}  # threads that wait leave a busy machine to others
    result = subprocess.run(program, capture_output=True, text=True, cwd=tmp_path, env=calm, check=False)
    assert result.returncode == 0, result.stderr
    assert [text for text in SAID if text not in result.stdout] == []
