"""Extension point: quantizations, which decide how a linear layer's weight is kept and multiplied.

Also the place for lossless repacking (capability flag `lossless`): the weight in an order that a kernel likes.

`build(options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.specs.weight_loader import WeightSource

API: Final = 1
HOOK: Final = "quantizations"


class Linear(ABC):
    """The product y = x W^T + b of one layer."""

    out_features: int
    in_features: int

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """[T, in] -> [T, out], a fresh contiguous tensor in the dtype of x."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes kept for the weight."""

    def dense(self) -> Tensor | None:
        """The weight as a dense [out, in] tensor if it is kept as one (for tied embeddings), else None."""
        return None


class Quantization(ABC):
    """Makes linear layers out of named weights."""

    @abstractmethod
    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        """One layer whose rows are those of the named weights in order (q, k and v, say), read from `source`.

        `bias` names as many vectors as there are weights, or none.
        """

    @abstractmethod
    def head(self, embedding: Tensor) -> Linear:
        """The output layer over an embedding matrix [vocab, hidden] that is tied to it; shares memory if it can."""


@hookspec
def quantizations() -> Iterable[Offer[Quantization]]:  # type: ignore[empty-body]
    """Offer quantizations. Must not import torch."""


__all__ = ["API", "HOOK", "Linear", "Quantization", "quantizations"]
