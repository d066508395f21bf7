"""Multi-head latent attention in its absorbed form: queries go to the latent space, keys and values never leave it.

The up-projections of keys and values are cut into one matrix per head when the model is loaded. A score is then the
product of a query that was multiplied by its head's key matrix with the stored row itself, and the weighted sum of
latents is multiplied by the head's value matrix (DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops import Ops
from engine.plugins.models.deepseek.shape import DeepseekShape
from engine.specs.model import Forward
from engine.specs.quantization import Linear

INNER_EPS = 1e-6
"""Of the norms over the compressed query and the latent, whatever `rms_norm_eps` says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """The attention of one layer. `up` makes queries of their compression, where the model compresses them."""

    down: Linear  # rows of the queries or of their compression, then of the latent, then of the rotary key
    latent_norm: Tensor  # [latent]
    key_up: Tensor  # [heads, nope, latent]
    value_up: Tensor  # [heads, latent, v_dim]
    out: Linear
    query_norm: Tensor | None = None  # [q_rank]
    up: Linear | None = None  # rows of each head: without position, then rotary

    def __call__(
        self, index: int, x: Tensor, positions: Tensor, cos_sin: Tensor, shape: DeepseekShape, ops: Ops, step: Forward
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; stores one row [latent + rope_dim] for each token."""
        made = self.down(x)
        first, latent, key = made.split_with_sizes((made.shape[1] - shape.row, shape.latent, shape.rope_dim), -1)
        if self.up is not None and self.query_norm is not None:
            first = self.up(ops.rms_norm(first, self.query_norm, INNER_EPS))
        queries = first.view(-1, shape.heads, shape.nope + shape.rope_dim)
        fixed, turned = queries.split_with_sizes((shape.nope, shape.rope_dim), -1)
        ops.rope(turned, key[:, None], positions, cos_sin)
        stored = torch.cat((ops.rms_norm(latent, self.latent_norm, INNER_EPS), key), -1)[:, None]
        absorbed = torch.bmm(fixed.transpose(0, 1), self.key_up).transpose(0, 1)
        mixed = step.attend(index, torch.cat((absorbed, turned), -1), stored, None)
        return self.out(torch.bmm(mixed.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1))

    def tensors(self) -> tuple[Linear | Tensor | None, ...]:
        """What it holds."""
        up = (self.query_norm, self.up)
        return self.down, *up, self.latent_norm, self.key_up, self.value_up, self.out


def split_up_projection(weight: Tensor, shape: DeepseekShape) -> tuple[Tensor, Tensor]:
    """kv_b_proj [heads * (nope + v_dim), latent] -> key_up and value_up, each of its own memory."""
    heads = weight.view(shape.heads, shape.nope + shape.v_dim, shape.latent)
    key, value = heads.split_with_sizes((shape.nope, shape.v_dim), 1)
    return key.contiguous(), value.transpose(1, 2).contiguous()


__all__ = ["LatentAttention", "split_up_projection"]
