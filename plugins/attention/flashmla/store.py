"""Put a step's new latent rows into their pages, as they are or in 8 bits."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda


@triton.jit(do_not_specialize=["row_stride"])
def store(rows, row_stride, slots, pages, PDL: tl.constexpr):
    """Program (token): bfloat16 rows [T, 576] to pages [slots, 576]; slots int64 [T], below 0 for padding."""
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    to = pages + slot * 576
    latent = tl.arange(0, 512)
    rope = 512 + tl.arange(0, 64)
    tl.store(to + latent, tl.load(rows + token * row_stride + latent))
    tl.store(to + rope, tl.load(rows + token * row_stride + rope))


@triton.jit(do_not_specialize=["row_stride"])
def store_packed(rows, row_stride, slots, small, scales, ropes, PDL: tl.constexpr):
    """Program (token): rows [T, 576] in 8 bits; the last three point at the same pages of 656-byte rows.

    `engine.latent.rows.PackedRows` says what a row holds; small float8_e4m3fn, scales float32, ropes bfloat16.
    """
    if PDL:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    group = tl.arange(0, 4)
    at = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    latent = tl.load(rows + token * row_stride + at).to(tl.float32)
    least = tl.maximum(tl.max(tl.abs(latent), 1) / 448.0, 1e-4)
    bits = (least.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000  # the least power of two not below
    scale = bits.to(tl.float32, bitcast=True)
    tl.store(small + slot * 656 + at, (latent / scale[:, None]).to(tl.float8e4nv))
    tl.store(scales + slot * 164 + 128 + group, scale)
    rope = tl.arange(0, 64)
    tl.store(ropes + slot * 328 + 264 + rope, tl.load(rows + token * row_stride + 512 + rope))


__all__ = ["store", "store_packed"]
