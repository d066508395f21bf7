"""Dense linear layers: the named weights become one matrix, so that q, k and v (say) are one product."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops.experts import StackedExperts, stack
from engine.specs.quantization import Experts, Linear, Quantization
from engine.specs.weight_loader import WeightSource


class DenseLinear(Linear):
    """y = x W^T + b."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight = weight
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def weight_bytes(self) -> int:
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def dense(self) -> Tensor:
        return self._weight


class DenseQuantization(Quantization):
    """Keeps every weight in one dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        weight = source.joined(names, self._dtype, device)
        return DenseLinear(weight, source.joined(bias, self._dtype, device) if bias else None)

    def head(self, embedding: Tensor) -> Linear:
        return DenseLinear(embedding, None)

    def experts(self, source: WeightSource, names: Sequence[Sequence[str]], device: torch.device) -> Experts:
        gate_ups, downs = [one[:2] for one in names], [one[2:] for one in names]
        return StackedExperts(stack(source, gate_ups, self._dtype, device), stack(source, downs, self._dtype, device))


__all__ = ["DenseLinear", "DenseQuantization"]
