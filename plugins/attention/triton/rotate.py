"""Rotary positions while queries and keys are read: spares a launch a layer.

The same mathematics and rounding as the `rope` of `engine.ops.triton_ops`, for heads that rotate whole.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def angles(cos_sin, position, d, DIM: tl.constexpr):
    """Cosine and signed sine for the elements d of a head; position and d broadcast against each other."""
    at = cos_sin + position * DIM + d % (DIM // 2)
    sin = tl.load(at + DIM // 2)
    return tl.load(at), tl.where(d < DIM // 2, -sin, sin)


@triton.jit
def load_rotated(at, d, here, cos, sin, DIM: tl.constexpr):
    """The elements d of the rows at the pointers `at`, rotated and rounded to their type."""
    rows = tl.load(at + d, mask=here, other=0.0)
    partners = tl.load(at + (d + DIM // 2) % DIM, mask=here, other=0.0)
    return (rows.to(tl.float32) * cos + partners.to(tl.float32) * sin).to(rows.dtype)


__all__ = ["angles", "load_rotated"]
