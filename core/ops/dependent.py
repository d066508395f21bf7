"""Kernels that begin before the one ahead of them has ended (programmatic dependent launch, compute capability 9.0).

A kernel launched with `launch_pdl=EARLY` says `begin(EARLY)` first, so that the next may come onto the chip as well,
and `wait(EARLY)` before it touches anything that the kernels ahead write or read. Between the two it may only fetch
what does not change: weights, tables. Every program of such a kernel must wait, or the order would not carry over.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

EARLY: Final = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)
"""Whether this device can."""


LINE = tl.constexpr(64)
"""Elements of 16 bits in a cache line."""


@triton.jit
def begin(EARLY: tl.constexpr):
    """Let the next kernel begin when all programs of this one are on the chip."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until the kernels ahead have ended and their results can be seen."""
    if EARLY:
        cuda.gdc_wait()


@triton.jit
def fetch(at):
    """Ask for the cache lines at a tile of valid addresses to come into the L2; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [at], dtype=tl.int32, is_pure=False, pack=1
    )


__all__ = ["EARLY", "LINE", "begin", "fetch", "wait"]
