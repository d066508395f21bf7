"""Kernels that the interpreter runs are compiled for Hopper as well, where no GPU is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")


def test_kernels_compile_for_hopper(compiled: Callable[[str], dict[str, Any]]) -> None:
    found = compiled("triton_compile.py")
    assert set(found) == {"decode", "gather", "tiles"}
    assert max(found.values()) <= 64, found
