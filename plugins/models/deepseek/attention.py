"""Multi-head latent attention: one row per token for all heads (DeepSeek-V2, arXiv 2405.04434, section 2.1).

The up-projection of keys and values is cut into one matrix per head when the model is loaded. Who meets rows with it,
the queries or the rows themselves, is the attention backend's choice.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.latent.up import LatentUp
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
    heads: LatentUp  # from a row to each head's key and value
    out: Linear
    query_norm: Tensor | None = None  # [q_rank]
    up: Linear | None = None  # rows of each head: without position, then rotary

    def __call__(
        self, index: int, x: Tensor, positions: Tensor, cos_sin: Tensor, shape: DeepseekShape, ops: Ops, step: Forward
    ) -> Tensor:
        """[T, hidden] -> [T, hidden]; stores one row [latent + rope_dim] for each token."""
        made = self.down(x)
        first, row = made.split_with_sizes((made.shape[1] - shape.row, shape.row), -1)
        if self.up is not None and self.query_norm is not None:
            first = self.up(ops.rms_norm(first, self.query_norm, INNER_EPS))
        queries = first.view(-1, shape.heads, shape.nope + shape.rope_dim)
        rows = ops.latent_rows(queries, row, self.latent_norm, INNER_EPS, positions, cos_sin)
        return self.out(step.attend_latent(index, queries, rows, self.heads).flatten(1))

    def tensors(self) -> tuple[Linear | Tensor | None, ...]:
        """What it holds."""
        up = (self.query_norm, self.up)
        return self.down, *up, self.latent_norm, self.heads.weight, self.out


__all__ = ["LatentAttention"]
