"""The operations as Triton kernels, for CUDA: one pass over memory each, rounded where `TorchOps` rounds.

Imported only where a CUDA device was chosen.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.ops import Ops, grouped
from engine.ops.dependent import EARLY, begin, wait
from engine.ops.experts import Stack
from engine.ops.triton_latent import absorb, latent_rows, lift
from engine.routing import Routing


@triton.jit(do_not_specialize=["eps"])
def _rms_norm(
    x,
    residual,
    weight,
    y,
    x_row,
    x_inner,
    inner,
    width,
    eps,
    WIDTH: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    EARLY: tl.constexpr,
):
    """One row a program; with ADD, residual (dense) += x first and the sum is normed.

    With PARTS, a row of x is the sum of so many, x_inner apart.
    """
    begin(EARLY)
    row = tl.program_id(0).to(tl.int64)
    at = x + (row // inner) * x_row + (row % inner) * x_inner
    i = tl.arange(0, WIDTH)
    here = i < width
    scale = tl.load(weight + i, mask=here, other=0.0)
    wait(EARLY)
    values = tl.load(at + i, mask=here, other=0.0)
    if PARTS > 1:
        summed = values.to(tl.float32)
        for part in tl.static_range(1, PARTS):
            summed += tl.load(at + part * x_inner + i, mask=here, other=0.0).to(tl.float32)
        values = summed.to(values.dtype)
    if ADD:
        before = tl.load(residual + row * width + i, mask=here, other=0.0)
        values = (before.to(tl.float32) + values.to(tl.float32)).to(before.dtype)
        tl.store(residual + row * width + i, values, mask=here)
    wide = values.to(tl.float32)
    wide = wide * tl.rsqrt(tl.sum(wide * wide, 0) / width + eps)
    normed = wide.to(values.dtype).to(tl.float32) * scale.to(tl.float32)
    tl.store(y + row * width + i, normed.to(values.dtype), mask=here)


@triton.jit
def _rotate(at, heads, stride, cos, sin, HEADS: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    h = tl.arange(0, HEADS)
    i = tl.arange(0, HALF_PAD)
    here = (h[:, None] < heads) & (i[None, :] < HALF)
    first = at + h[:, None] * stride + i[None, :]
    a = tl.load(first, mask=here, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=here, other=0.0).to(tl.float32)
    tl.store(first, (a * cos[None, :] - b * sin[None, :]).to(at.dtype.element_ty), mask=here)
    tl.store(first + HALF, (b * cos[None, :] + a * sin[None, :]).to(at.dtype.element_ty), mask=here)


@triton.jit
def _rope(
    q,
    k,
    positions,
    cos_sin,
    q_token,
    q_head,
    k_token,
    k_head,
    q_heads,
    k_heads,
    Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PAD: tl.constexpr,
    EARLY: tl.constexpr,
):
    """All heads of one token a program."""
    begin(EARLY)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, HALF_PAD)
    row = cos_sin + tl.load(positions + token) * (2 * HALF)
    cos = tl.load(row + i, mask=i < HALF, other=0.0)
    sin = tl.load(row + HALF + i, mask=i < HALF, other=0.0)
    wait(EARLY)
    _rotate(q + token * q_token, q_heads, q_head, cos, sin, Q_HEADS, HALF, HALF_PAD)
    _rotate(k + token * k_token, k_heads, k_head, cos, sin, K_HEADS, HALF, HALF_PAD)


@triton.jit
def _silu_mul(gate_up, y, row_stride, width, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = i < width
    gate = tl.load(gate_up + row * row_stride + i, mask=here, other=0.0)
    up = tl.load(gate_up + row * row_stride + width + i, mask=here, other=0.0)
    wide = gate.to(tl.float32)
    active = (wide / (1.0 + tl.exp(-wide))).to(gate.dtype)
    tl.store(y + row * width + i, (active.to(tl.float32) * up.to(tl.float32)).to(gate.dtype), mask=here)


class TritonOps(Ops):
    """float32, bfloat16 and float16 on CUDA; every launch may be captured in a graph."""

    def __init__(self) -> None:
        self._routers: dict[torch.device, grouped.Router] = {}

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, x, weight, eps, add=False)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous(), "the residual must be contiguous"
        return self._norm(x, residual, weight, eps, add=True)

    @staticmethod
    def _norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Tensor:
        shape, width = residual.shape, x.shape[-1]
        parts = x.shape[1] if x.dim() > residual.dim() else 1
        inner, inner_stride = (1, x.stride(1)) if residual.dim() == 2 else (shape[1], x.stride(1))
        y = torch.empty(shape, dtype=x.dtype, device=x.device)
        padded = triton.next_power_of_2(width)
        warps = 1 if padded <= 256 else 4 if padded <= 2048 else 8
        _rms_norm[(shape[0] * inner,)](
            x,
            residual,
            weight,
            y,
            x.stride(0),
            inner_stride,
            inner,
            width,
            eps,
            WIDTH=padded,
            ADD=add,
            PARTS=parts,
            EARLY=EARLY,
            num_warps=warps,
            launch_pdl=EARLY,
        )
        return y

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        half = cos_sin.shape[1] // 2
        _rope[(q.shape[0],)](
            q,
            k,
            positions,
            cos_sin,
            *q.stride()[:2],
            *k.stride()[:2],
            q.shape[1],
            k.shape[1],
            Q_HEADS=triton.next_power_of_2(q.shape[1]),
            K_HEADS=triton.next_power_of_2(k.shape[1]),
            HALF=half,
            HALF_PAD=triton.next_power_of_2(half),
            EARLY=EARLY,
            launch_pdl=EARLY,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape[0], gate_up.shape[1] // 2
        y = torch.empty(tokens, width, dtype=gate_up.dtype, device=gate_up.device)
        _silu_mul[(tokens, triton.cdiv(width, 1024))](
            gate_up, y, gate_up.stride(0), width, BLOCK=1024, EARLY=EARLY, launch_pdl=EARLY
        )
        return y

    def latent_rows(
        self, queries: Tensor, made: Tensor, norm: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
    ) -> Tensor:
        tokens, heads, _ = queries.shape
        rotary, width = cos_sin.shape[1], made.shape[1]
        rows = torch.empty(tokens, width, dtype=made.dtype, device=made.device)
        latent_rows[(tokens,)](
            queries[..., -rotary:],
            made,
            norm,
            positions,
            cos_sin,
            rows,
            *queries.stride()[:2],
            made.stride(0),
            heads,
            eps,
            HEADS=triton.next_power_of_2(heads),
            LATENT=width - rotary,
            LATENT_PAD=triton.next_power_of_2(width - rotary),
            HALF=rotary // 2,
            HALF_PAD=triton.next_power_of_2(rotary // 2),
            EARLY=EARLY,
            launch_pdl=EARLY,
        )
        return rows

    def absorb(self, queries: Tensor, key: Tensor) -> Tensor:
        tokens, heads, width = queries.shape
        _, nope, latent = key.shape
        y = torch.empty(tokens, heads, latent + width - nope, dtype=queries.dtype, device=queries.device)
        tile = _token_tile(tokens)
        absorb[(triton.cdiv(latent, 128), heads, triton.cdiv(tokens, tile))](
            queries,
            key,
            y,
            tokens,
            *queries.stride()[:2],
            heads,
            NOPE=nope,
            NOPE_PAD=max(16, triton.next_power_of_2(nope)),
            LATENT=latent,
            ROPE=width - nope,
            ROPE_PAD=triton.next_power_of_2(width - nope),
            TOKENS=tile,
            COLUMNS=128,
            PRECISION=grouped.precision(queries),
            EARLY=EARLY,
            launch_pdl=EARLY,
        )
        return y

    def lift(self, latents: Tensor, value: Tensor) -> Tensor:
        tokens, heads, latent = latents.shape
        width = value.shape[1]
        y = torch.empty(tokens, heads, width, dtype=latents.dtype, device=latents.device)
        tile = _token_tile(tokens)
        lift[(triton.cdiv(width, 32), heads, triton.cdiv(tokens, tile))](
            latents,
            value,
            y,
            tokens,
            *latents.stride()[:2],
            heads,
            LATENT=latent,
            LATENT_PAD=max(16, triton.next_power_of_2(latent)),
            WIDTH=width,
            TOKENS=tile,
            COLUMNS=32,
            PRECISION=grouped.precision(latents),
            EARLY=EARLY,
            num_warps=4 if tile <= 32 else 8,
            launch_pdl=EARLY,
        )
        return y

    def route(self, x: Tensor, router: Tensor, correction: Tensor | None, rule: Routing) -> tuple[Tensor, Tensor]:
        if x.device not in self._routers:
            self._routers[x.device] = grouped.Router(x.device)
        return self._routers[x.device](x, router, correction, rule)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Stack, down: Stack, always: int = 0) -> Tensor:
        return grouped.mix(x, ids, weights, gate_up, down, always)


def _token_tile(tokens: int) -> int:
    return 16 if tokens <= 16 else 32 if tokens <= 32 else 64


__all__ = ["TritonOps"]
