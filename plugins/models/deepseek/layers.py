"""The parts of DeepSeek's layers, and making them out of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.feed_forward import GatedMlp, RoutedExperts
from engine.latent.up import LatentUp
from engine.ops import Ops
from engine.plugins.models.deepseek.attention import LatentAttention
from engine.plugins.models.deepseek.shape import DeepseekShape
from engine.specs.model import Forward
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer. `next_norm` follows it: the input norm of the next layer, or the final one."""

    attention: LatentAttention
    feed_forward: GatedMlp | RoutedExperts
    mlp_norm: Tensor  # [hidden]
    next_norm: Tensor
    last: bool = False  # of the model

    def __call__(
        self,
        index: int,
        x: Tensor,
        residual: Tensor,
        positions: Tensor,
        cos_sin: Tensor,
        shape: DeepseekShape,
        ops: Ops,
        step: Forward,
    ) -> Tensor:
        """x [T, hidden] is normed, residual [T, hidden] is added to in place; returns what `next_norm` makes of it."""
        x = self.attention(index, x, positions, cos_sin, shape, ops, step)
        if self.last:
            x, residual = step.keep(x), step.keep(residual)
        x = ops.add_rms_norm(x, residual, self.mlp_norm, shape.eps)
        return ops.add_rms_norm(self.feed_forward(x, ops), residual, self.next_norm, shape.eps)

    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        held = (*self.attention.tensors(), self.mlp_norm, self.next_norm)
        return count_bytes(held) + self.feed_forward.weight_bytes()


def count_bytes(held: Iterable[Linear | Tensor | None]) -> int:
    """Bytes of weights in memory."""
    return sum(x.nbytes if isinstance(x, Tensor) else 0 if x is None else x.weight_bytes() for x in held)


@dataclass(frozen=True, slots=True)
class Reader:
    """Makes the parts of the decoder out of a checkpoint."""

    shape: DeepseekShape
    source: WeightSource
    linears: Quantization
    ops: Ops
    device: torch.device
    dtype: torch.dtype

    def dense(self, name: str, suffix: str = ".weight", dtype: torch.dtype | None = None) -> Tensor:
        """A tensor that isn't multiplied as a linear layer."""
        return self.source.get(f"model.{name}{suffix}", dtype or self.dtype).to(self.device)

    def linear(self, *names: str) -> Linear:
        """The named matrices one below the other."""
        return self.linears.linear(self.source, [f"model.{name}.weight" for name in names], (), self.device)

    def layer(self, index: int, next_norm: str, *, last: bool = False) -> Layer:
        """The layer `index`, and the norm that follows it."""
        at = f"layers.{index}"
        dense = self.shape.routing is None or index < self.shape.dense_layers
        return Layer(
            attention=self._attention(f"{at}.self_attn"),
            feed_forward=self._mlp(f"{at}.mlp") if dense else self._experts(f"{at}.mlp"),
            mlp_norm=self.dense(f"{at}.post_attention_layernorm"),
            next_norm=self.dense(next_norm),
            last=last,
        )

    def _attention(self, at: str) -> LatentAttention:
        heads = self.dense(f"{at}.kv_b_proj").view(self.shape.heads, -1, self.shape.latent)
        compressed = self.shape.q_rank is not None
        return LatentAttention(
            down=self.linear(f"{at}.{'q_a_proj' if compressed else 'q_proj'}", f"{at}.kv_a_proj_with_mqa"),
            query_norm=self.dense(f"{at}.q_a_layernorm") if compressed else None,
            up=self.linear(f"{at}.q_b_proj") if compressed else None,
            latent_norm=self.dense(f"{at}.kv_a_layernorm"),
            heads=LatentUp.of(heads, self.shape.nope, self.ops),
            out=self.linear(f"{at}.o_proj"),
        )

    def _mlp(self, at: str) -> GatedMlp:
        return GatedMlp(gate_up=self.linear(f"{at}.gate_proj", f"{at}.up_proj"), down=self.linear(f"{at}.down_proj"))

    def _experts(self, at: str) -> RoutedExperts:
        rule = self.shape.routing
        assert rule is not None, "a layer of experts has a router"
        names = [
            [f"model.{at}.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
            for expert in range(rule.experts + rule.always)
        ]
        correction = self.dense(f"{at}.gate", ".e_score_correction_bias", torch.float32) if rule.corrected else None
        experts = self.linears.experts(self.source, names, self.device)
        return RoutedExperts(rule=rule, router=self.dense(f"{at}.gate"), correction=correction, experts=experts)


__all__ = ["Layer", "Reader", "count_bytes"]
