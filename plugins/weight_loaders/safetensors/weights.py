"""The tensors of safetensors files, copied out of a memory map as they are asked for."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.specs.weight_loader import WeightSource


class SafetensorsWeights(WeightSource):
    """One checkpoint in one or more files."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = list(files)
        self._open: dict[Path, Any] = {path: _open(path) for path in files}
        self._homes: dict[str, Path] = {}
        for path, handle in self._open.items():
            for name in handle.keys():  # noqa: SIM118 (no mapping, it has keys only)
                if name in self._homes:
                    raise ValueError(f"tensor {name} lies in both {self._homes[name]} and {path}; remove one file")
                self._homes[name] = path

    def names(self) -> Iterable[str]:
        return self._homes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(name).get_slice(name).get_shape())

    def origin(self, name: str) -> str:
        return str(self._homes.get(name, self._files[0] if len(self._files) == 1 else self._files[0].parent))

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        handle = self._handle(name)
        try:
            tensor: Tensor = handle.get_tensor(name) if rows is None else handle.get_slice(name)[rows]
        except SafetensorError as error:
            raise ValueError(f"{self.origin(name)}: tensor {name} can't be read: {error}") from None
        return tensor.to(dtype)

    def digest(self) -> str:
        names = hashlib.sha256()
        for path in self._files:
            with path.open("rb") as file:
                length = file.read(8)
                names.update(length + file.read(int.from_bytes(length, "little")))
            names.update(f"{path.name} {path.stat().st_size}".encode())
        return names.hexdigest()[:16]

    def close(self) -> None:
        self._open = {}

    def _handle(self, name: str) -> Any:
        if name not in self._homes:
            raise KeyError(f"{self.origin(name)} lacks tensor {name}")
        return self._open[self._homes[name]]


def _open(path: Path) -> Any:
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or no safetensors file: {error}; fetch it again") from None


__all__ = ["SafetensorsWeights"]
