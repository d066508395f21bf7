"""The operations in plain torch: right on every device and dtype, and the yardstick of faster ones."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import Ops
from engine.ops.experts import Stack, mix_stacks, route
from engine.routing import Routing


class TorchOps(Ops):
    """Each operation rounds where the Hugging Face models round, but for `rope`, which rounds once at its end."""

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
        return weight * wide.to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        residual += x if x.dim() == residual.dim() else x.float().sum(1).to(x.dtype)
        return self.rms_norm(residual, weight, eps)

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        cos, sin = cos_sin[positions].unsqueeze(1).chunk(2, dim=-1)
        for heads in (q, k):
            first, second = heads[..., : cos_sin.shape[1]].chunk(2, dim=-1)
            a, b = first.float(), second.float()
            rotated = a * cos - b * sin, b * cos + a * sin  # both before either store: float() of float32 is no copy
            first.copy_(rotated[0])
            second.copy_(rotated[1])

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return functional.silu(gate) * up

    def latent_rows(
        self, queries: Tensor, made: Tensor, norm: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
    ) -> Tensor:
        rotary = cos_sin.shape[1]
        latent, key = made.split_with_sizes((made.shape[1] - rotary, rotary), -1)
        self.rope(queries[..., -rotary:], key[:, None], positions, cos_sin)
        return torch.cat((self.rms_norm(latent, norm, eps), key), -1)

    def absorb(self, queries: Tensor, key: Tensor) -> Tensor:
        nope = key.shape[1]
        fixed = torch.bmm(queries[..., :nope].transpose(0, 1), key).transpose(0, 1)
        return torch.cat((fixed, queries[..., nope:]), -1)

    def lift(self, latents: Tensor, value: Tensor) -> Tensor:
        return torch.bmm(latents.transpose(0, 1), value.transpose(1, 2)).transpose(0, 1)

    def route(self, x: Tensor, router: Tensor, correction: Tensor | None, rule: Routing) -> tuple[Tensor, Tensor]:
        return route(x, router, correction, rule)

    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Stack, down: Stack, always: int = 0) -> Tensor:
        return mix_stacks(x, ids, weights, gate_up, down, self)


__all__ = ["TorchOps"]
