"""The Llama family's decoder: one forward pass for every member, driven by a `DecoderShape`.

It knows no attention backend, no cache and no quantization; it runs on the runner's thread, once a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.feed_forward import GatedMlp, RoutedExperts
from engine.ops import Ops
from engine.ops.rope_table import rope_table
from engine.plugins.models.llama.shape import DecoderShape, tensors
from engine.specs.attention import Rotation
from engine.specs.model import Forward, Model, ModelProfile
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """The weights of one layer. `next_norm` follows it: the input norm of the next layer, or the final one."""

    qkv: Linear  # rows of q, then k, then v
    out: Linear
    feed_forward: GatedMlp | RoutedExperts
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None
    mlp_norm: Tensor  # [hidden]
    next_norm: Tensor


class Decoder(Model):
    """Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE."""

    def __init__(
        self,
        shape: DecoderShape,
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
        ops, eps = self._ops, self._shape.eps
        residual, rotation = self._embedding[tokens], Rotation(ops, positions, self._cos_sin)
        step.tap(0, residual)
        x = ops.rms_norm(residual, self._first_norm, eps)
        for index, layer in enumerate(self._layers):
            x = self._attention(index, layer, x, rotation, step)
            if layer is self._layers[-1]:  # all KV is stored: what nobody samples from ends here
                x, residual = step.keep(x), step.keep(residual)
            x = ops.add_rms_norm(layer.out(x), residual, layer.mlp_norm, eps)
            x = layer.feed_forward(x, ops)
            x = ops.add_rms_norm(x, residual, layer.next_norm, eps)
            step.tap(index + 1, residual)
        return x

    def _attention(self, index: int, layer: Layer, x: Tensor, rotation: Rotation, step: Forward) -> Tensor:
        """[T, heads * head_dim], before the output projection."""
        shape, ops = self._shape, self._ops
        qkv = layer.qkv(x).view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = qkv.split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = ops.rms_norm(q, layer.q_norm, shape.eps), ops.rms_norm(k, layer.k_norm, shape.eps)
        return step.attend_rotated(index, q, k, v, rotation).flatten(1)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens]

    def weight_bytes(self) -> int:
        linears = [x for layer in self._layers for x in (layer.qkv, layer.out, layer.feed_forward)]
        vectors = [x for layer in self._layers for x in (layer.q_norm, layer.k_norm, layer.mlp_norm, layer.next_norm)]
        loose = sum(x.nbytes for x in (*vectors, self._first_norm, self._embedding) if x is not None)
        shared = self._head.dense() is self._embedding
        return loose + sum(x.weight_bytes() for x in linears) + (0 if shared else self._head.weight_bytes())


def load(
    shape: DecoderShape,
    profile: ModelProfile,
    weights: WeightSource,
    linears: Quantization,
    ops: Ops,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Decoder:
    """Read the weights and make the decoder.

    Raises:
        ValueError: a weight is missing or of another shape than the config says.
    """
    weights.expect(tensors(shape))

    def dense(name: str) -> Tensor:
        return weights.get(f"model.{name}.weight", dtype).to(device)

    def linear(prefix: str, names: tuple[str, ...], biased: bool) -> Linear:
        full = [f"model.{prefix}.{name}_proj" for name in names]
        bias = [f"{name}.bias" for name in full] if biased else []
        return linears.linear(weights, [f"{name}.weight" for name in full], bias, device)

    def mlp(at: str) -> GatedMlp:
        return GatedMlp(gate_up=linear(at, ("gate", "up"), shape.mlp_bias), down=linear(at, ("down",), shape.mlp_bias))

    def layer(index: int) -> Layer:
        at = f"layers.{index}"
        last = index + 1 == shape.layers
        return Layer(
            qkv=linear(f"{at}.self_attn", ("q", "k", "v"), shape.qkv_bias),
            out=linear(f"{at}.self_attn", ("o",), shape.out_bias),
            feed_forward=_experts(f"{at}.mlp", shape, weights, linears, dense(f"{at}.mlp.gate"))
            if shape.routed(index)
            else mlp(f"{at}.mlp"),
            q_norm=dense(f"{at}.self_attn.q_norm") if shape.qk_norm else None,
            k_norm=dense(f"{at}.self_attn.k_norm") if shape.qk_norm else None,
            mlp_norm=dense(f"{at}.post_attention_layernorm"),
            next_norm=dense("norm" if last else f"layers.{index + 1}.input_layernorm"),
        )

    table = "model.embed_tokens.weight"
    embedding = dense("embed_tokens")
    if shape.tied:
        head = linears.tied_head(weights, table, embedding)
    else:
        head = linears.linear(weights, ["lm_head.weight"], (), device)
    return Decoder(
        shape,
        profile,
        ops,
        embedding=embedding,
        first_norm=dense("layers.0.input_layernorm"),
        layers=[layer(index) for index in range(shape.layers)],
        head=head,
    )


def _experts(
    at: str, shape: DecoderShape, weights: WeightSource, linears: Quantization, router: Tensor
) -> RoutedExperts:
    rule = shape.routing
    assert rule is not None, "a layer of experts has a router"
    names = [
        [f"model.{at}.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down")]
        for expert in range(rule.experts)
    ]
    made = linears.experts(weights, names, router.device)
    return RoutedExperts(rule=rule, router=router, correction=None, experts=made)


__all__ = ["Decoder", "Layer", "load"]
