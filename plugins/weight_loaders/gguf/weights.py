"""The tensors of a GGUF file, decoded from a memory map as they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from engine.plugins.weight_loaders.gguf.blocks import DECODERS
from engine.plugins.weight_loaders.gguf.format import Header, TensorEntry
from engine.plugins.weight_loaders.gguf.names import heads_interleaved, hugging_face_name
from engine.plugins.weight_loaders.gguf.stored import SPLITTERS
from engine.specs.weight_loader import Blocks, WeightSource


class GGUFWeights(WeightSource):
    """One file. Dense tensors are made on request; the map is private, so nothing can be written back."""

    def __init__(self, header: Header, config: dict[str, Any]) -> None:
        self._header = header
        self._arch = header.metadata["general.architecture"]
        self._heads = {"heads": config["num_attention_heads"], "kv_heads": config["num_key_value_heads"]}
        self._entries = {
            known: entry for name, entry in header.tensors.items() if (known := hugging_face_name(name)) is not None
        }
        self._data: Tensor | None = torch.from_file(str(header.path), shared=False, size=header.size, dtype=torch.uint8)

    def names(self) -> Iterable[str]:
        return self._entries.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def origin(self, name: str) -> str:
        return str(self._header.path)

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        entry = self._entry(name)
        raw = self._raw(entry)
        if rows is not None:
            raw = raw[rows]
        values = DECODERS[entry.format.name](raw.reshape(-1, entry.format.size))
        return values.to(dtype).view(-1, *entry.shape[1:])

    def blocks(self, name: str) -> Blocks | None:
        entry = self._entry(name)
        split = SPLITTERS.get(entry.format.name)
        if split is None or len(entry.shape) != 2:
            return None
        return split(self._raw(entry).view(entry.shape[0], -1, entry.format.size))

    def _raw(self, entry: TensorEntry) -> Tensor:
        """The bytes of a tensor, uint8 [rows, bytes of a row], rows in our order."""
        assert self._data is not None, "the checkpoint was closed"
        raw = self._data[entry.offset : entry.offset + entry.nbytes].view(entry.shape[0], -1)
        if (count := heads_interleaved(self._arch, entry.name)) is not None:
            raw = raw[_halves_apart(entry.shape[0], self._heads[count])]
        return raw

    def digest(self) -> str:
        with self._header.path.open("rb") as file:
            head = hashlib.sha256(file.read(self._header.data_start))
        head.update(str(self._header.size).encode())
        return head.hexdigest()[:16]

    def close(self) -> None:
        self._data = None

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise KeyError(f"{self._header.path} lacks tensor {name}")
        return self._entries[name]


def _halves_apart(rows: int, heads: int) -> Tensor:
    """Row order that puts the two rotating halves of each head one after the other; int64 [rows]."""
    return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).flatten()


__all__ = ["GGUFWeights"]
