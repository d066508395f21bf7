"""The Gluon kernels are compiled for Hopper where no GPU is: names of this Triton, registers and shared memory fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED = 227 * 1024  # bytes of shared memory a program can have


def test_kernels_compile_for_hopper(tmp_path: Path) -> None:
    run = subprocess.run(
        [sys.executable, Path(__file__).with_name("flashmla_compile.py")],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)
    assert {name: kernel["products"] for name, kernel in found.items()} == {
        "wide": ["m64n256k16", "m64n64k16"],
        "narrow": ["m64n16k16"],
        "packed": ["m64n16k16"],
    }
    assert all(kernel["shared"] <= SHARED for kernel in found.values())
    assert all(kernel["stack"] <= 256 for kernel in found.values())  # bytes; what spills does so between requests
