"""The kernels are compiled for Hopper where no GPU is: names of this Triton, registers and shared memory fit."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from engine.plugins.attention.flashmla.few import macros, source
from engine.plugins.attention.flashmla.schedule import OVERHEAD

SHARED = 227 * 1024  # bytes of shared memory a program can have


def test_the_wide_kernel_compiles_for_hopper(compiled: Callable[[str], dict[str, Any]]) -> None:
    found = compiled("flashmla_compile.py")
    assert found["products"] == ["m64n128k16", "m64n64k16"]
    assert found["shared"] <= SHARED
    assert found["stack"] <= 320  # bytes a thread (none with Triton 3.6): what spills does so between requests


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs NVIDIA's compiler")
@pytest.mark.parametrize(("heads", "packed"), [(16, False), (40, True)])
def test_the_kernels_of_few_heads_compile_for_hopper(tmp_path: Path, heads: int, packed: bool) -> None:
    (tmp_path / "few.cu").write_text(source())
    defines = [f"-D{name}={int(value)}" for name, value in macros(heads, packed).items()]
    target = ["-gencode=arch=compute_90a,code=sm_90a", "-cubin", "-Xptxas=-v", *defines]
    run = subprocess.run(
        ["nvcc", *target, "few.cu", "-o", "few.cubin"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-2000:]
    assert all(int(bytes) <= 64 for bytes in re.findall(r"(\d+) bytes stack frame", run.stderr))


def test_every_phase_of_a_barrier_is_seen_by_the_warps_that_wait_for_it() -> None:
    assert all(macros(16, packed)["STAGES"] % 2 == 0 for packed in (False, True))


def test_places_on_the_line_are_counted_alike_in_both_languages() -> None:
    assert f"constexpr int OVERHEAD = {OVERHEAD.value};" in source()
