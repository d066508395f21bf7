"""DeepSeek's decoder: one forward pass for V2 and V3, driven by a `DeepseekShape`.

It knows no attention backend, no cache and no quantization; it runs on the runner's thread, once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops import Ops
from engine.ops.rope_table import rope_table
from engine.plugins.models.deepseek.layers import Layer, Reader, count_bytes
from engine.plugins.models.deepseek.next_layer import NextLayer
from engine.plugins.models.deepseek.shape import DeepseekShape, next_tensors, tensors
from engine.plugins.models.deepseek.source import DeepseekSource
from engine.specs.model import Forward, Model, ModelProfile
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource


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
            x = layer(index, x, residual, positions, self._cos_sin, shape, ops, step)
            step.tap(index + 1, residual)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return self.scores(hidden).float()

    def scores(self, hidden: Tensor) -> Tensor:
        return self._head(hidden)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._embedding[tokens]

    def next_modules(self, weights: WeightSource, linears: Quantization) -> list[NextLayer]:
        shape, table = self._shape, self._embedding
        if not shape.next_layers:
            return []
        source = DeepseekSource(weights, shape)
        names = range(shape.layers, shape.layers + shape.next_layers)
        source.expect({name: size for index in names for name, size in next_tensors(shape, index).items()})
        reader = Reader(shape, source, linears, self._ops, table.device, table.dtype)
        return [NextLayer.read(reader, index, self._cos_sin, self._ops) for index in names]

    def weight_bytes(self) -> int:
        shared = self._head.dense() is self._embedding
        ends = (self._embedding, self._first_norm, None if shared else self._head)
        return count_bytes(ends) + sum(layer.weight_bytes() for layer in self._layers)


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
    reader = Reader(shape, source, linears, ops, device, dtype)
    embedding = reader.dense("embed_tokens")
    norms = [f"layers.{index}.input_layernorm" for index in range(1, shape.layers)] + ["norm"]
    head = linears.head(embedding) if shape.tied else linears.linear(source, ["lm_head.weight"], (), device)
    return DeepseekDecoder(
        shape,
        profile,
        ops,
        embedding=embedding,
        first_norm=reader.dense("layers.0.input_layernorm"),
        layers=[reader.layer(index, norm, last=norm == "norm") for index, norm in enumerate(norms)],
        head=head,
    )


__all__ = ["DeepseekDecoder", "load"]
