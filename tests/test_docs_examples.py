"""The Python examples of the documentation run as they stand, on the packaged model."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "offline.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
SAID = ("four, five, six, seven", "Hello")
"""What the model writes, greedily, somewhere in each example."""


@pytest.mark.slow
@pytest.mark.parametrize(("code", "said"), [*zip(EXAMPLES, SAID, strict=True)], ids=["LLM", "AsyncLLM"])
def test_the_example_runs(code: str, said: str, tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert result.returncode == 0, result.stderr
    assert said in result.stdout
