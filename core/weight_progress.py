"""A weight source that tells how far the loading has come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from engine.specs.weight_loader import Blocks, WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class ReportedWeights(WeightSource):
    """Passes everything through and reports the share of the expected tensors that was read, at most once a percent."""

    def __init__(self, inner: WeightSource, report: Callable[[float], None]) -> None:
        self._inner, self._report = inner, report
        self._left: set[str] = set()
        self._total = 1
        self._told = -1

    def names(self) -> Iterable[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def origin(self, name: str) -> str:
        return self._inner.origin(name)

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._inner.expect(shapes)
        self._left, self._total = set(shapes), max(1, len(shapes))

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        tensor = self._inner.get(name, dtype, rows)
        self._count(name)
        return tensor

    def blocks(self, name: str) -> Blocks | None:
        found = self._inner.blocks(name)
        if found is not None:
            self._count(name)
        return found

    def _count(self, name: str) -> None:
        self._left.discard(name)
        percent = 100 - 100 * len(self._left) // self._total
        if percent > self._told:
            self._told = percent
            self._report(percent / 100)

    def digest(self) -> str:
        return self._inner.digest()

    def close(self) -> None:
        self._inner.close()


__all__ = ["ReportedWeights"]
