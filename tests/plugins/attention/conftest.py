"""Compiling kernels where no GPU is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def compiled(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a program of this folder that compiles kernels, with nothing cached; returns what it prints as JSON."""

    def run(program: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, Path(__file__).with_name(program)],
            env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run
