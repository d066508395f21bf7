"""Extension point: quantizations, which decide how a linear layer's weight is kept and multiplied.

Also the place for lossless repacking (capability flag `lossless`): the weight in an order that a kernel likes.

Threads: `linear`, `experts` and `head` run while the model is built, on the runner's thread; so does the product, in
every step and under `torch.inference_mode`. On CUDA a product may be captured in a graph: it may not wait for the
device.

Errors: `linear` passes on what `WeightSource.get` raises and raises ValueError for shapes that it can't pack. A product
must not raise.

`build(options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.ops import Ops
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

    def gated(self, x: Tensor, ops: Ops) -> Tensor:
        """The product's first half through silu, times its second half: [T, in] -> [T, out / 2]."""
        return ops.silu_mul(self(x))

    def dense(self) -> Tensor | None:
        """The weight as a dense [out, in] tensor if it is kept as one (for tied embeddings), else None."""
        return None


class Experts(ABC):
    """The gated feed-forward networks of one layer among which a router chooses for each token."""

    @abstractmethod
    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, ops: Ops, always: int = 0) -> Tensor:
        """The weighted sum of each token's experts, in x's dtype: arguments and result as those of `Ops.mix`."""

    @abstractmethod
    def weight_bytes(self) -> int:
        """Bytes kept for the weights."""


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

    def experts(self, source: WeightSource, names: Sequence[Sequence[str]], device: torch.device) -> Experts:
        """The experts of one layer, for each the names of gate, up and down; by default two linear layers each."""
        from engine.ops.experts import LinearExperts

        return LinearExperts(
            [self.linear(source, one[:2], (), device) for one in names],
            [self.linear(source, one[2:], (), device) for one in names],
        )

    def tied_head(self, source: WeightSource, name: str, embedding: Tensor) -> Linear:
        """The same, for who would rather read the embedding from `source` again than take it as it was rounded."""
        return self.head(embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizationOffer(Offer[Quantization]):
    """An offer that says beforehand what it keeps; for a plain `Offer` a plan counts elements of the dtype.

    `bytes_per_weight` is for one element of a linear layer, scales included; None is the dtype's size. `formats` are
    those of files whose blocks are multiplied as they are, each with the bytes of a weight then. Who is only faithful
    is taken by `auto` where a file keeps all its matrices so.
    """

    bytes_per_weight: float | None = None
    formats: Mapping[str, float] = field(default_factory=dict, hash=False)
    copies_tied_head: bool = False  # an output layer that is tied to the embedding is kept a second time

    def mean_bytes(self, stored: Mapping[str, int]) -> float | None:
        """Bytes per weight of a file that keeps so many weights in which format."""
        total = sum(stored.values())
        if self.bytes_per_weight is None or not self.formats or not total:
            return self.bytes_per_weight
        kept = (count * self.formats.get(name, self.bytes_per_weight) for name, count in stored.items())
        return sum(kept) / total


BUILDS: Final = Quantization


@hookspec
def quantizations() -> Iterable[Offer[Quantization]]:  # type: ignore[empty-body]
    """Offer quantizations. Must not import torch."""


__all__ = ["API", "HOOK", "Experts", "Linear", "Quantization", "QuantizationOffer", "quantizations"]
