"""Deterministic random weights. What tensors there are is what the model says it expects."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from zlib import crc32

from engine.checkpoint import folder_config
from engine.specs.weight_loader import WeightLoader, WeightSource

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.tokenizer import Tokenizer

_SPREAD: Final = 0.02  # standard deviation that transformers initialises with

_PERIOD: Final = 2**22 - 3
"""Numbers drawn, a prime. Every tensor repeats them from a place of its own: billions would take minutes to draw."""


class DummyLoader(WeightLoader):
    """A folder with a `config.json`, and a tokenizer if texts are to be served."""

    def recognizes(self, path: Path) -> bool:
        return (path / "config.json").is_file()

    def config(self, path: Path) -> dict[str, Any]:
        return folder_config(path)

    def tokenizer(self, path: Path) -> Tokenizer:
        from engine.tokenizer import Tokenizer

        return Tokenizer.from_folder(path)

    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        return DummyWeights(path, config)


class DummyWeights(WeightSource):
    """Weights drawn from a normal distribution, norms of one. A tensor's name says where its numbers begin.

    Embeddings, projections and routers are as wide as in a model before training, so that states differ from token to
    token and routers spread them over their experts.
    """

    def __init__(self, path: Path, config: Mapping[str, Any]) -> None:
        self._path = path
        self._config = dict(config)
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._drawn: dict[torch.dtype, Tensor] = {}

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._shapes:
            raise KeyError(f"{self._path}: the model did not say that it needs tensor {name}")
        return self._shapes[name]

    def origin(self, name: str) -> str:
        return str(self._path / "config.json")

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        import torch

        shape = self.shape(name)
        if len(shape) == 1 and name.endswith("weight"):
            values = torch.ones(shape, dtype=dtype)
        else:
            values = self._take(shape, crc32(name.encode()) % _PERIOD, dtype)
        return values if rows is None else values[rows]

    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self._config, sort_keys=True).encode()).hexdigest()[:16]

    def close(self) -> None:
        """Nothing is held open."""

    def _take(self, shape: tuple[int, ...], first: int, dtype: torch.dtype) -> Tensor:
        import torch

        if dtype not in self._drawn:
            once = torch.randn(_PERIOD, generator=torch.Generator().manual_seed(0)) * _SPREAD
            twice = torch.cat((once, once)).to(dtype)  # in which most tensors lie in one piece
            on_cuda = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
            self._drawn[dtype] = twice.pin_memory() if on_cuda else twice
        drawn, size = self._drawn[dtype], math.prod(shape)
        turns = -(-(first + size) // len(drawn))
        whole = drawn if turns == 1 else drawn.repeat(turns)
        return whole[first : first + size].view(shape)


__all__ = ["DummyLoader", "DummyWeights"]
