"""The layer behind DeepSeek-V3's last that looks a token further ahead (arXiv 2412.19437, section 2.2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops import Ops
from engine.plugins.models.deepseek.layers import Layer, Reader, count_bytes
from engine.plugins.models.deepseek.shape import DeepseekShape
from engine.specs.model import Forward, NextModule
from engine.specs.quantization import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class NextLayer(NextModule):
    """Joins a state with the embedding of the token after it and runs one decoder layer on them."""

    shape: DeepseekShape
    ops: Ops
    cos_sin: Tensor
    embedded_norm: Tensor  # [hidden]
    hidden_norm: Tensor
    join: Linear  # [hidden, 2 hidden]: columns of the embedding, then of the state
    first_norm: Tensor
    layer: Layer  # followed by the norm of the module's head

    @classmethod
    def read(cls, reader: Reader, index: int, cos_sin: Tensor, ops: Ops) -> NextLayer:
        """The module that is stored as layer `index`. Its embedding and output layer are the model's."""
        at = f"layers.{index}"
        return cls(
            shape=reader.shape,
            ops=ops,
            cos_sin=cos_sin,
            embedded_norm=reader.dense(f"{at}.enorm"),
            hidden_norm=reader.dense(f"{at}.hnorm"),
            join=reader.linear(f"{at}.eh_proj"),
            first_norm=reader.dense(f"{at}.input_layernorm"),
            layer=reader.layer(index, f"{at}.shared_head.norm"),
        )

    def __call__(self, hidden: Tensor, embedded: Tensor, positions: Tensor, step: Forward, layer: int = 0) -> Tensor:
        ops, eps = self.ops, self.shape.eps
        both = ops.rms_norm(embedded, self.embedded_norm, eps), ops.rms_norm(hidden, self.hidden_norm, eps)
        residual = self.join(torch.cat(both, -1))
        x = ops.rms_norm(residual, self.first_norm, eps)
        return self.layer(layer, x, residual, positions, self.cos_sin, self.shape, ops, step)

    def weight_bytes(self) -> int:
        held = (self.embedded_norm, self.hidden_norm, self.join, self.first_norm)
        return count_bytes(held) + self.layer.weight_bytes()


__all__ = ["NextLayer"]
