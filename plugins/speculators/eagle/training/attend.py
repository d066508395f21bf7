"""The attention of training-time test without its [T, T] matrix: exact, through the log-sum-exp of two parts.

In step i a query sees the keys of step 0 up to its position, and one key of each later step, that of its own chain.
The causal part goes through a fused kernel, which also returns the log of its sum of exponentials; the chain's keys
come in by hand. Backwards the same kernel is given the output and the log-sum-exp of both parts together: it then
computes the weights that its keys really have (as ring attention does across devices, arXiv 2310.01889).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.plugins.speculators.eagle.module import Attend


class FusedUnrolled(Attend):
    """As `engine.plugins.speculators.eagle.module.Unrolled` without a window, in memory that grows with T."""

    def __init__(self) -> None:
        self._true: tuple[Tensor, Tensor] | None = None  # step 0
        self._chains: list[tuple[Tensor, Tensor]] = []  # steps 1, 2, …

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self._true is None:
            self._true = k, v
            return functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        self._chains.append((k, v))
        chain_k, chain_v = (torch.stack(part) for part in zip(*self._chains, strict=True))
        out: Tensor = _TwoParts.apply(q, *self._true, chain_k, chain_v)  # type: ignore[no-untyped-call]
        return out


class _TwoParts(torch.autograd.Function):
    """q, k, v [B, H, T, d] causal, with chain_k, chain_v [n, B, H, T, d] on the diagonal -> [B, H, T, d]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, chain_k: Tensor, chain_v: Tensor) -> Tensor:
        scale = q.shape[-1] ** -0.5
        causal, causal_lse, ctx.kernel = _causal(q, k, v, scale)
        scores = (q * chain_k).sum(-1, dtype=torch.float32) * scale
        lse = torch.logaddexp(causal_lse, scores.logsumexp(0))
        weights = (scores - lse).exp().unsqueeze(-1)
        wide = causal * (causal_lse - lse).exp().unsqueeze(-1) + (weights * chain_v).sum(0)
        out: Tensor = wide.to(q.dtype)
        ctx.save_for_backward(q, k, v, chain_k, chain_v, out, lse, weights)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, k, v, chain_k, chain_v, out, lse, weights = ctx.saved_tensors
        (grad,) = grads
        scale = q.shape[-1] ** -0.5
        dq, dk, dv = _causal_backward(grad, q, k, v, out, lse, scale, ctx.kernel)
        mean = (grad * out).sum(-1, keepdim=True, dtype=torch.float32)  # of the values' worth, as weighted
        dscores = weights * ((grad * chain_v).sum(-1, keepdim=True, dtype=torch.float32) - mean) * scale
        dchain_v = (weights * grad).to(q.dtype)
        dchain_k = (dscores * q).to(q.dtype)
        return (dq + (dscores * chain_k).sum(0)).to(q.dtype), dk, dv, dchain_k, dchain_v


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Output, float32 [B, H, T] log-sum-exp, and what the backward of the kernel wants besides."""
    if _flash(q):
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *rest = flash(q, k, v, 0.0, True, False, scale=scale)
        return out, lse, tuple(rest[:6])
    scores = _scores(q, k, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse.unsqueeze(-1)).exp().to(v.dtype) @ v, lse, ()


def _causal_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, scale: float, kernel: tuple[Any, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v where `out` and `lse` are those of a softmax over more keys than these."""
    if _flash(q):
        cum_q, cum_k, max_q, max_k, seed, offset = kernel
        back = torch.ops.aten._scaled_dot_product_flash_attention_backward
        found: tuple[Tensor, Tensor, Tensor] = back(
            grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
        )
        return found
    weights = (_scores(q, k, scale) - lse.unsqueeze(-1)).exp()
    mean = (grad * out).sum(-1, keepdim=True, dtype=torch.float32)
    dscores = (weights * ((grad @ v.transpose(-1, -2)).float() - mean) * scale).to(q.dtype)
    return dscores @ k, dscores.transpose(-1, -2) @ q, weights.to(grad.dtype).transpose(-1, -2) @ grad


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """float32 [B, H, T, T], minus infinity above the diagonal."""
    future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return ((q @ k.transpose(-1, -2)).float() * scale).masked_fill(future, -torch.inf)


def _flash(q: Tensor) -> bool:
    return q.is_cuda and q.dtype in (torch.bfloat16, torch.float16)


__all__ = ["FusedUnrolled"]
