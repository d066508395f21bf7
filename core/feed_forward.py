"""The part of a decoder layer behind its attention: a gated network, or many of them among which a router chooses."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from engine.ops import Ops
from engine.routing import Routing
from engine.specs.quantization import Experts, Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """down(silu(gate x) * up x)."""

    gate_up: Linear  # rows of gate, then up
    down: Linear

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.gate_up.gated(x, ops))

    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        return self.gate_up.weight_bytes() + self.down.weight_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The weighted sum of the networks that a router chooses for each token."""

    rule: Routing
    router: Tensor  # [experts, hidden]
    correction: Tensor | None  # float32 [experts]
    experts: Experts

    def __call__(self, x: Tensor, ops: Ops) -> Tensor:
        """[T, hidden] -> what `Ops.add_rms_norm` adds: [T, hidden], or its parts [T, parts, hidden]."""
        return self.experts(x, *ops.route(x, self.router, self.correction, self.rule), ops, self.rule.always)

    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        bias = 0 if self.correction is None else self.correction.nbytes
        return self.router.nbytes + bias + self.experts.weight_bytes()


__all__ = ["GatedMlp", "RoutedExperts"]
