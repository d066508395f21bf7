"""Reads GGUF files: configuration, tokenizer and weights from the one file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.checkpoint import gguf_file
from engine.plugins.weight_loaders.gguf.format import MAGIC, Header, read_header
from engine.plugins.weight_loaders.gguf.metadata import config_from
from engine.plugins.weight_loaders.gguf.names import hugging_face_name
from engine.specs.weight_loader import WeightLoader, WeightSource

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


class GGUFLoader(WeightLoader):
    """One file, or a folder in which it is the only one. Headers are parsed anew by each method: it takes 50 ms."""

    def recognizes(self, path: Path) -> bool:
        if path.is_file():
            with path.open("rb") as file:
                return path.suffix.lower() == ".gguf" or file.read(len(MAGIC)) == MAGIC
        return gguf_file(path) is not None

    def config(self, path: Path) -> dict[str, Any]:
        return config_from(_header(path))

    def formats(self, path: Path) -> Mapping[str, int]:
        kept: Counter[str] = Counter()
        for name, entry in _header(path).tensors.items():
            if len(entry.shape) == 2 and hugging_face_name(name) is not None:
                kept[entry.format.name] += prod(entry.shape)
        return kept

    def tokenizer(self, path: Path) -> Tokenizer:
        from engine.plugins.weight_loaders.gguf.tokenizer import tokenizer_from

        return tokenizer_from(_header(path))

    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        from engine.plugins.weight_loaders.gguf.weights import GGUFWeights

        return GGUFWeights(_header(path), config)


def _header(path: Path) -> Header:
    file = path if path.is_file() else gguf_file(path)
    if file is None:
        raise ValueError(f"{path} holds {len(list(path.glob('*.gguf')))} GGUF files; name the one to load")
    return read_header(file)


__all__ = ["GGUFLoader"]
