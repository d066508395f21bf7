"""DeepSeek's decoder: one forward pass for V2 and V3, driven by a `DeepseekShape`.

It knows no attention backend, no cache and no quantization; it runs on the runner's thread, once a step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.latent.up import LatentUp
from engine.ops import Ops
from engine.ops.experts import RoutedExperts
from engine.ops.rope_table import rope_table
from engine.plugins.models.deepseek.attention import LatentAttention
from engine.plugins.models.deepseek.shape import DeepseekShape, tensors
from engine.plugins.models.deepseek.source import DeepseekSource
from engine.specs.model import Forward, Model, ModelProfile
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Mlp:
    """A gated feed-forward network."""

    gate_up: Linear  # rows of gate, then up
    down: Linear

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        return self.down(self.gate_up.gated(x, ops))

    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return self.gate_up.weight_bytes() + self.down.weight_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer. `next_norm` follows it: the input norm of the next layer, or the final one."""

    attention: LatentAttention
    feed_forward: Mlp | RoutedExperts
    mlp_norm: Tensor  # [hidden]
    next_norm: Tensor


class DeepseekDecoder(Model):
    """DeepSeek V2, V2-Lite, V3 and R1."""

    def __init__(
        self,
        shape: DeepseekShape,
        profile: ModelProfile,
        ops: Ops,
        *,
        embedding: Tensor,
        first_norm: Tensor,
        layers: list[Layer],
        head: Linear,
    ) -> None:
        self.profile = profile
        self._shape = shape
        self._ops = ops
        self._embedding = embedding  # [vocab, hidden]
        self._first_norm = first_norm
        self._layers = layers
        self._head = head
        self._cos_sin = rope_table(shape.rope, profile.max_context).to(embedding.device)

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        shape, ops = self._shape, self._ops
        residual = self._embedding[tokens]
        step.tap(0, residual)
        x = ops.rms_norm(residual, self._first_norm, shape.eps)
        for index, layer in enumerate(self._layers):
            x = layer.attention(index, x, positions, self._cos_sin, shape, ops, step)
            x = ops.add_rms_norm(x, residual, layer.mlp_norm, shape.eps)
            x = layer.feed_forward(x, ops)
            x = ops.add_rms_norm(x, residual, layer.next_norm, shape.eps)
            step.tap(index + 1, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(hidden).float()

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens]

    def weight_bytes(self) -> int:
        shared = self._head.dense() is self._embedding
        held: list[Linear | Tensor | None] = [self._embedding, self._first_norm, None if shared else self._head]
        for layer in self._layers:
            held += [*layer.attention.tensors(), layer.mlp_norm, layer.next_norm]
        return _bytes(held) + sum(layer.feed_forward.weight_bytes() for layer in self._layers)


def _bytes(held: Iterable[Linear | Tensor | None]) -> int:
    return sum(x.nbytes if isinstance(x, Tensor) else 0 if x is None else x.weight_bytes() for x in held)


def load(
    shape: DeepseekShape,
    profile: ModelProfile,
    weights: WeightSource,
    linears: Quantization,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> DeepseekDecoder:
    """Read the weights and make the decoder.

    Raises:
        ValueError: a weight is missing, of another shape than the config says, or scaled by what is no number.
    """
    source = DeepseekSource(weights, shape)
    source.expect(tensors(shape))
    reader = _Reader(shape, source, linears, device, dtype)
    embedding = reader.dense("embed_tokens")
    head = linears.head(embedding) if shape.tied else linears.linear(source, ["lm_head.weight"], (), device)
    return DeepseekDecoder(
        shape,
        profile,
        ops,
        embedding=embedding,
        first_norm=reader.dense("layers.0.input_layernorm"),
        layers=[reader.layer(index) for index in range(shape.layers)],
        head=head,
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Makes the parts of the decoder out of a checkpoint."""

    shape: DeepseekShape
    source: WeightSource
    linears: Quantization
    device: torch.device
    dtype: torch.dtype

    def dense(self, name: str, suffix: str = ".weight", dtype: torch.dtype | None = None) -> Tensor:
        return self.source.get(f"model.{name}{suffix}", dtype or self.dtype).to(self.device)

    def linear(self, *names: str) -> Linear:
        return self.linears.linear(self.source, [f"model.{name}.weight" for name in names], (), self.device)

    def layer(self, index: int) -> Layer:
        at = f"layers.{index}"
        last = index + 1 == self.shape.layers
        dense = self.shape.routing is None or index < self.shape.dense_layers
        return Layer(
            attention=self._attention(f"{at}.self_attn"),
            feed_forward=self._mlp(f"{at}.mlp") if dense else self._experts(f"{at}.mlp"),
            mlp_norm=self.dense(f"{at}.post_attention_layernorm"),
            next_norm=self.dense("norm" if last else f"layers.{index + 1}.input_layernorm"),
        )

    def _attention(self, at: str) -> LatentAttention:
        heads = self.dense(f"{at}.kv_b_proj").view(self.shape.heads, -1, self.shape.latent)
        compressed = self.shape.q_rank is not None
        return LatentAttention(
            down=self.linear(f"{at}.{'q_a_proj' if compressed else 'q_proj'}", f"{at}.kv_a_proj_with_mqa"),
            query_norm=self.dense(f"{at}.q_a_layernorm") if compressed else None,
            up=self.linear(f"{at}.q_b_proj") if compressed else None,
            latent_norm=self.dense(f"{at}.kv_a_layernorm"),
            heads=LatentUp.of(heads, self.shape.nope),
            out=self.linear(f"{at}.o_proj"),
        )

    def _mlp(self, at: str) -> Mlp:
        return Mlp(gate_up=self.linear(f"{at}.gate_proj", f"{at}.up_proj"), down=self.linear(f"{at}.down_proj"))

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


__all__ = ["DeepseekDecoder", "Layer", "Mlp", "load"]
