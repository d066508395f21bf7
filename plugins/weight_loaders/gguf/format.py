"""The GGUF container: header, metadata and the table of tensors. Reads no weight and imports no torch.

Layout (github.com/ggml-org/ggml, docs/gguf.md): magic, version, counts; key-value pairs; tensor table; padding; data.
All numbers are little-endian.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple

MAGIC: Final = b"GGUF"
_VERSIONS: Final = (2, 3)
_STRING: Final = 8
_ARRAY: Final = 9
_NUMBERS: Final = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class BlockFormat(NamedTuple):
    """How a tensor type packs its elements."""

    name: str
    elements: int  # in one block
    size: int  # bytes of one block


BLOCK_FORMATS: Final = {
    0: BlockFormat("F32", 1, 4),
    1: BlockFormat("F16", 1, 2),
    2: BlockFormat("Q4_0", 32, 18),
    3: BlockFormat("Q4_1", 32, 20),
    6: BlockFormat("Q5_0", 32, 22),
    7: BlockFormat("Q5_1", 32, 24),
    8: BlockFormat("Q8_0", 32, 34),
    12: BlockFormat("Q4_K", 256, 144),
    13: BlockFormat("Q5_K", 256, 176),
    14: BlockFormat("Q6_K", 256, 210),
    30: BlockFormat("BF16", 1, 2),
}
"""Readable tensor types, by their number in the file."""


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One row of the tensor table."""

    name: str
    shape: tuple[int, ...]  # outermost axis first, as torch counts
    format: BlockFormat
    offset: int  # bytes from the start of the file

    @property
    def row_bytes(self) -> int:
        """Bytes of one run along the last axis."""
        return self.shape[-1] // self.format.elements * self.format.size

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True, slots=True)
class Header:
    """All of a file but its weights."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorEntry]
    size: int  # bytes of the file
    data_start: int


def read_header(path: Path) -> Header:
    """Parse the header.

    Raises:
        ValueError: bad magic, unknown version or tensor type, or a file shorter than its table says.
    """
    with path.open("rb") as file:
        start = file.read(4)
        if start != MAGIC:
            raise ValueError(f"{path} is not a GGUF file: it begins with {start!r}, not {MAGIC!r}")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            try:
                return _parse(path, data)
            except (struct.error, IndexError):
                raise ValueError(
                    f"{path} is truncated: its {len(data)} bytes end within the header; fetch it again"
                ) from None
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is damaged: a name in its header is not UTF-8 ({error.reason})") from None


def _parse(path: Path, data: mmap.mmap) -> Header:
    cursor = _Cursor(data, 4)
    if (version := cursor.number("I")) not in _VERSIONS:
        raise ValueError(f"{path} has GGUF version {version}; versions {_VERSIONS[0]} and {_VERSIONS[1]} can be read")
    num_tensors, num_pairs = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(num_pairs):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    rows = [_row(path, cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {name: TensorEntry(name, shape, form, start + offset) for name, shape, form, offset in rows}
    for entry in tensors.values():
        if entry.offset + entry.nbytes > len(data):
            raise ValueError(
                f"{path} is truncated: tensor {entry.name} ends at byte {entry.offset + entry.nbytes}, the file has "
                f"{len(data)}; fetch it again"
            )
    return Header(path, metadata, tensors, len(data), start)


def _row(path: Path, cursor: _Cursor) -> tuple[str, tuple[int, ...], BlockFormat, int]:
    name = cursor.string()
    shape = tuple(cursor.number("Q") for _ in range(cursor.number("I")))[::-1]
    kind = cursor.number("I")
    if kind not in BLOCK_FORMATS:
        known = ", ".join(form.name for form in BLOCK_FORMATS.values())
        raise ValueError(f"{path}: tensor {name} is packed as GGUF type {kind}, which can't be read; readable: {known}")
    form = BLOCK_FORMATS[kind]
    if not shape or shape[-1] % form.elements:
        raise ValueError(f"{path}: tensor {name} of shape {list(shape)} is no whole number of {form.name} blocks")
    return name, shape, form, cursor.number("Q")


class _Cursor:
    """Reads values one after another; struct.error past the end."""

    def __init__(self, data: mmap.mmap, at: int) -> None:
        self._data = data
        self.at = at

    def number(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        end = self.at + 8 + self.number("Q")
        if end > len(self._data):
            raise IndexError("a string ends behind the file")
        text = self._data[self.at : end].decode()
        self.at = end
        return text

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array(self.number("I"), self.number("Q"))
        return self.number(_code(kind))

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY:
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{_code(kind)}"
        values = list(struct.unpack_from(code, self._data, self.at))
        self.at += struct.calcsize(code)
        return values

    def _strings(self, count: int) -> list[str]:
        """Vocabularies have some hundred thousand strings, so this loop is kept bare."""
        data, at, size = self._data, self.at, len(self._data)
        unpack: Callable[..., tuple[Any, ...]] = struct.Struct("<Q").unpack_from
        texts = []
        for _ in range(count):
            begin = at + 8
            at = begin + unpack(data, at)[0]
            if at > size:
                raise IndexError("a string ends behind the file")
            texts.append(data[begin:at].decode())
        self.at = at
        return texts


def _code(kind: int) -> str:
    if kind not in _NUMBERS:
        raise IndexError(f"value type {kind}")  # only a damaged header has one
    return _NUMBERS[kind]


__all__ = ["BLOCK_FORMATS", "MAGIC", "BlockFormat", "Header", "TensorEntry", "read_header"]
