"""Tiles of latent rows in shared memory."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

copy_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared memory): Triton 3.6's name is the longer one."""


@gluon.jit
def clear_rows(tile, filled, COLUMNS: gl.constexpr):
    """Zero the rows from `filled` on of a [64, COLUMNS] tile: what no token has written may be NaN, and 0 x NaN is."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))
    for part in gl.static_range(COLUMNS // 64):
        piece = tile.slice(part * 64, 64, dim=1)
        kept = piece.load(layout)
        piece.store(gl.where(row[:, None] < filled, kept, 0.0))


__all__ = ["clear_rows", "copy_tile"]
