"""Keys and values in 8 bits, as `engine.eight_bits` has them."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.plugins.attention.triton.rotate import angles, load_rotated


@triton.jit
def pack(rows):
    """float32 [R, D] -> uint8 [R, D], and the bits of the scales, int32 [R]."""
    most = tl.maximum(tl.max(tl.abs(rows), 1), 9.094947017729282e-13)  # 2 ** -40
    bits = ((most.to(tl.int32, bitcast=True) + 0x1FFFFF) & 0x7F800000) - (8 << 23)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    return (rows * inverse[:, None]).to(tl.float8e4nv).to(tl.uint8, bitcast=True), bits


@triton.jit
def widen(stored, TYPE: tl.constexpr):
    """uint8 of e4m3 -> TYPE, without their scales."""
    return stored.to(tl.float8e4nv, bitcast=True).to(TYPE)


@triton.jit
def scale_of(exponent):
    """uint8 -> float32."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def store_one(
    row, pages, scales, page, page_stride, inside, d, ROWS: tl.constexpr, DIM: tl.constexpr, PACKED: tl.constexpr
):
    """One row [D] to its place `inside` a page of so many rows; with PACKED the page is dense and has scales."""
    to = pages + page * page_stride + inside * DIM + d
    if PACKED:
        small, bits = pack(tl.where(d < DIM, row, 0.0).to(tl.float32)[None, :])
        tl.store(to[None, :], small, mask=(d < DIM)[None, :])
        tl.store(scales + page * ROWS + inside + tl.arange(0, 1), (bits >> 23).to(tl.uint8))
    else:
        tl.store(to, row, mask=d < DIM)


@triton.jit
def _keep(
    rows_at,
    pages,
    scales,
    cos_sin,
    position,
    slot,
    head_stride,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """All heads of one token. Unless rotated here, the rows are also rounded where they lie."""
    h = tl.arange(0, HEADS_PAD)
    d = tl.arange(0, DIM_PAD)
    here = (h[:, None] < HEADS) & (d[None, :] < DIM)
    at = rows_at + h[:, None] * head_stride
    if ROTATE:
        cos, sin = angles(cos_sin, position, d, DIM)
        rows = load_rotated(at, d[None, :], here, cos[None, :], sin[None, :], DIM)
    else:
        rows = tl.load(at + d[None, :], mask=here, other=0.0)
    small, bits = pack(rows.to(tl.float32))
    if not ROTATE:
        kept = widen(small, tl.float32) * bits.to(tl.float32, bitcast=True)[:, None]
        tl.store(at + d[None, :], kept.to(rows.dtype), mask=here)
    row = (slot // PAGE * HEADS + h) * PAGE + slot % PAGE
    tl.store(pages + row[:, None] * DIM + d[None, :], small, mask=here)
    tl.store(scales + row, (bits >> 23).to(tl.uint8), mask=h < HEADS)


@triton.jit(do_not_specialize=["first"])
def store_packed(
    k,
    v,
    k_pages,
    v_pages,
    k_scales,
    v_scales,
    slot_mapping,
    positions,
    cos_sin,
    k_token,
    k_head,
    v_token,
    v_head,
    first,
    HEADS: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    DIM: tl.constexpr,
    DIM_PAD: tl.constexpr,
    V_DIM: tl.constexpr,
    V_PAD: tl.constexpr,
    PAGE: tl.constexpr,
    ROTATE: tl.constexpr,
):
    """As `store` of `prefill`, in 8 bits; program (token after `first`).

    Pages are dense. Unless keys rotate here, k and v are left as the cache keeps them, so that those who read them from
    the projection see what later steps will read from the pages.
    """
    token = (first + tl.program_id(0)).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot < 0:
        return
    position = tl.load(positions + token)
    k_at = k + token * k_token
    _keep(k_at, k_pages, k_scales, cos_sin, position, slot, k_head, HEADS, HEADS_PAD, DIM, DIM_PAD, PAGE, ROTATE)
    v_at = v + token * v_token
    _keep(v_at, v_pages, v_scales, cos_sin, position, slot, v_head, HEADS, HEADS_PAD, V_DIM, V_PAD, PAGE, False)


__all__ = ["scale_of", "store_one", "store_packed", "widen"]
