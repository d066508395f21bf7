"""What stands around latent attention as Triton kernels: rows to be stored, queries and outputs in latent space.

Imported only where a CUDA device was chosen.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import triton
import triton.language as tl

from engine.ops.dependent import begin, wait


@triton.jit(do_not_specialize=["eps"])
def latent_rows(
    queries,
    made,
    norm,
    positions,
    cos_sin,
    rows,
    q_token,
    q_head,
    made_row,
    heads,
    eps,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One token a program: `Ops.latent_rows`. queries points at the rotary part of a token's first head."""
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, LATENT_PAD)
    is_latent = c < LATENT
    scale = tl.load(norm + c, mask=is_latent, other=0.0).to(tl.float32)
    i = tl.arange(0, HALF_PAD)
    is_half = i < HALF
    turn = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(turn + i, mask=is_half, other=0.0)
    sin = tl.load(turn + HALF + i, mask=is_half, other=0.0)
    wait(EARLY)
    source = made + token * made_row
    to = rows + token * (LATENT + 2 * HALF)
    latent = tl.load(source + c, mask=is_latent, other=0.0)
    wide = latent.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / LATENT + eps)
    normed = wide.to(latent.dtype).to(tl.float32) * scale
    tl.store(to + c, normed.to(latent.dtype), mask=is_latent)
    a = tl.load(source + LATENT + i, mask=is_half, other=0.0).to(tl.float32)
    b = tl.load(source + LATENT + HALF + i, mask=is_half, other=0.0).to(tl.float32)
    tl.store(to + LATENT + i, (a * cos - b * sin).to(latent.dtype), mask=is_half)
    tl.store(to + LATENT + HALF + i, (b * cos + a * sin).to(latent.dtype), mask=is_half)
    h = tl.arange(0, HEADS)
    at = queries + token * q_token + h[:, None] * q_head + i[None, :]
    here = (h[:, None] < heads) & is_half[None, :]
    a = tl.load(at, mask=here, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=here, other=0.0).to(tl.float32)
    tl.store(at, (a * cos[None, :] - b * sin[None, :]).to(latent.dtype), mask=here)
    tl.store(at + HALF, (b * cos[None, :] + a * sin[None, :]).to(latent.dtype), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def absorb(
    queries,
    key,
    y,
    tokens,
    q_token,
    q_head,
    heads,
    NOPE: tl.constexpr,
    NOPE_PAD: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    ROPE_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`Ops.absorb`: program (tile of latent columns, head, tile of tokens); the first tile also copies what rotated.

    queries [tokens, heads, NOPE + ROPE], key [heads, NOPE, LATENT] dense, y [tokens, heads, LATENT + ROPE] dense.
    """
    begin(EARLY)
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, NOPE_PAD)
    weight = tl.load(
        key + (head * NOPE + k)[:, None] * LATENT + column[None, :],
        mask=(k < NOPE)[:, None] & (column < LATENT)[None, :],
        other=0.0,
    )
    wait(EARLY)
    source = queries + token.to(tl.int64)[:, None] * q_token + head * q_head
    q = tl.load(source + k[None, :], mask=is_token[:, None] & (k < NOPE)[None, :], other=0.0)
    to = y + (token.to(tl.int64)[:, None] * heads + head) * (LATENT + ROPE)
    made = tl.dot(q, weight, input_precision=PRECISION)
    tl.store(to + column[None, :], made.to(y.dtype.element_ty), mask=is_token[:, None] & (column < LATENT)[None, :])
    if tile == 0:
        r = tl.arange(0, ROPE_PAD)
        here = is_token[:, None] & (r < ROPE)[None, :]
        tl.store(to + LATENT + r[None, :], tl.load(source + NOPE + r[None, :], mask=here, other=0.0), mask=here)


@triton.jit(do_not_specialize=["tokens"])
def lift(
    latents,
    value,
    y,
    tokens,
    x_token,
    x_head,
    heads,
    LATENT: tl.constexpr,
    LATENT_PAD: tl.constexpr,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
    EARLY: tl.constexpr,
):
    """`Ops.lift`: program (tile of a value's columns, head, tile of tokens).

    latents [tokens, heads, LATENT], value [heads, WIDTH, LATENT] dense, y [tokens, heads, WIDTH] dense.
    """
    begin(EARLY)
    head = tl.program_id(1)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    is_token = token < tokens
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    c = tl.arange(0, LATENT_PAD)
    weight = tl.load(
        value + (head * WIDTH + column)[None, :] * LATENT + c[:, None],
        mask=(column < WIDTH)[None, :] & (c < LATENT)[:, None],
        other=0.0,
    )
    wait(EARLY)
    source = latents + token.to(tl.int64)[:, None] * x_token + head * x_head + c[None, :]
    x = tl.load(source, mask=is_token[:, None] & (c < LATENT)[None, :], other=0.0)
    made = tl.dot(x, weight, input_precision=PRECISION)
    to = y + (token.to(tl.int64)[:, None] * heads + head) * WIDTH + column[None, :]
    tl.store(to, made.to(y.dtype.element_ty), mask=is_token[:, None] & (column < WIDTH)[None, :])


__all__ = ["absorb", "latent_rows", "lift"]
