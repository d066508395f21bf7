"""The folder of a head: `config.json` and one safetensors file, read under one spelling of names. Never unpickles.

Beside dense weights a file may hold `X.weight` as int8 with `X.weight_scale`, one number per row: the weight is their
product. That is this engine's own extension of the public format, for small files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import read_json
from engine.specs.weight_loader import Blocks, WeightSource

SCALE: Final = "_scale"
"""Behind the name of an int8 weight, the name of its scales."""

BLOCK: Final = 32
"""Weights of a row that share a scale where integers are multiplied."""

_SPELLINGS: Final = (
    (re.compile(r"^(?:model\.|draft_model\.)"), ""),
    (re.compile(r"^(?:layers\.0|transformer)\."), "midlayer."),
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^(?:aux_norm_low|fc_norm_low)\."), "fc_norm.0."),
    (re.compile(r"^(?:aux_norm_mid|fc_norm_mid)\."), "fc_norm.1."),
    (re.compile(r"^(?:aux_norm_high|fc_norm_high)\."), "fc_norm.2."),
)
"""Other names of the same tensors: those of engines, of the speculators library, and of early EAGLE-3.1 heads."""


def head_config(folder: Path) -> dict[str, Any]:
    """The head's `config.json`.

    Raises:
        ValueError: it is missing or malformed; the sentence names it.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is no folder; a draft head is a folder with config.json and a safetensors file")
    return read_json(folder / "config.json")


def weight_file(folder: Path) -> Path:
    """The one file with weights.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(f"{folder} holds {len(found)} safetensors files; a draft head has one")
    if pickled := sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern)):
        raise ValueError(
            f"{folder} holds pickled weights only ({pickled[0]}), which could run code and are not read; convert them "
            "to safetensors"
        )
    raise ValueError(f"{folder} holds no weights (*.safetensors)")


class HeadWeights(WeightSource):
    """An open head. Names are those of the EAGLE authors, whatever the file calls them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._open = _opened(file)
        self._stored: dict[str, str] = {}
        for name in self._open.keys():  # noqa: SIM118 (no mapping, it has keys only)
            plain = spelled(name)
            if plain in self._stored:
                raise ValueError(f"{file} holds {plain} twice, as {self._stored[plain]} and {name}")
            self._stored[plain] = name

    def names(self) -> Iterable[str]:
        return self._stored.keys()

    def has(self, name: str) -> bool:
        """Whether the file holds this tensor."""
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open.get_slice(self._name(name)).get_shape())

    def origin(self, name: str) -> str:
        return str(self._file)

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        values = self._read(name)
        if values.dtype is torch.int8 and self.has(name + SCALE):
            values = values.float() * self._scales(name, len(values))[:, None]
        elif values.is_floating_point() and not bool(values.isfinite().all()):
            raise ValueError(f"{self._file}: tensor {name} has values that are not finite")
        values = values.to(dtype)
        return values if rows is None else values[rows]

    def blocks(self, name: str) -> Blocks | None:
        """The int8 rows of a matrix in blocks that share the row's scale, if it is stored so."""
        if not self.has(name + SCALE) or self.shape(name)[-1] % BLOCK:
            return None
        codes = self._read(name)
        if codes.dtype is not torch.int8:
            return None
        codes = codes.view(len(codes), -1, BLOCK)
        scale = self._scales(name, len(codes)).half()
        return Blocks(bits=8, codes=codes, scale=scale[:, None].expand(codes.shape[:2]).contiguous())

    def digest(self) -> str:
        with self._file.open("rb") as file:
            length = file.read(8)
            header = file.read(int.from_bytes(length, "little"))
        return hashlib.sha256(length + header + str(self._file.stat().st_size).encode()).hexdigest()[:16]

    def close(self) -> None:
        self._open = None

    def _name(self, name: str) -> str:
        if name not in self._stored:
            raise KeyError(f"{self._file} lacks tensor {name}")
        return self._stored[name]

    def _read(self, name: str) -> Tensor:
        stored = self._name(name)
        try:
            tensor: Tensor = self._open.get_tensor(stored)
        except SafetensorError as error:
            raise ValueError(f"{self._file}: tensor {stored} can't be read: {error}") from None
        return tensor

    def _scales(self, name: str, rows: int) -> Tensor:
        scales = self._read(name + SCALE).float().flatten()
        if len(scales) != rows or not bool(scales.isfinite().all()):
            raise ValueError(f"{self._file}: tensor {name}{SCALE} must hold {rows} finite numbers, one per row")
        return scales


def _opened(file: Path) -> Any:
    try:
        return safe_open(str(file), framework="pt", device="cpu")
    except SafetensorError as error:
        raise ValueError(f"{file} is truncated or no safetensors file: {error}") from None


def spelled(name: str) -> str:
    """The EAGLE authors' name of a tensor."""
    for pattern, instead in _SPELLINGS:
        name = pattern.sub(instead, name)
    return name


__all__ = ["BLOCK", "SCALE", "HeadWeights", "head_config", "spelled", "weight_file"]
