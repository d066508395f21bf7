"""Extension point: weight loaders, which read one file format.

Opening a checkpoint reads its header only; tensors are read one by one when the model asks for them, under the names of
the Hugging Face checkpoint of that architecture, whatever the file calls them.

Threads: `recognizes`, `config` and `tokenizer` run in the HTTP process and in the engine core. `open` and the methods
of `WeightSource` run in the engine core, one call at a time: `expect` once, then `get` as often as the model needs,
then `close`.

Errors: KeyError for an absent tensor, ValueError or OSError for everything else, always naming the file. Start-up then
ends with that sentence.

`build(options) -> WeightLoader`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.tokenizer import Tokenizer

API: Final = 1
HOOK: Final = "weight_loaders"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A matrix as its file keeps it: in blocks of 32 along each row, in which a weight is scale x code + offset.

    Codes of 8 bits are int8 [rows, blocks, 32]; of 4 bits uint8 [rows, blocks, 16], where byte i of a block has code i
    in its low half and code i + 16 in its high one.
    """

    bits: int  # 4 (codes 0 to 15) or 8 (codes -128 to 127)
    codes: Tensor
    scale: Tensor  # float16 [rows, blocks]
    offset: Tensor | None = None  # float16 [rows, blocks]; None is zero


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaled:
    """A matrix as its file keeps it: FP8 values, each square block of which is multiplied by one factor."""

    values: Tensor  # float8_e4m3fn [out, in]
    scales: Tensor  # float32 [ceil(out / side), ceil(in / side)], finite
    side: int


class WeightSource(ABC):
    """An open checkpoint."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Names of all tensors, in the Hugging Face spelling."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header. Raises KeyError naming the tensor and the file when it is absent."""

    @abstractmethod
    def origin(self, name: str) -> str:
        """The file that holds a tensor (or should hold it), for error messages."""

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Told once, before the first read, of every tensor that will be asked for. Others may lie in the file.

        Raises:
            ValueError: one is absent or of another shape; the sentence names file, tensor, expected and found.
        """
        present = set(self.names())
        if missing := [name for name in shapes if name not in present]:
            others = f" and {len(missing) - 1} more that the config asks for" if len(missing) > 1 else ""
            raise ValueError(f"{self.origin(missing[0])} lacks tensor {missing[0]}{others}")
        for name, expected in shapes.items():
            if (found := self.shape(name)) != expected:
                raise ValueError(
                    f"{self.origin(name)}: tensor {name} has shape {list(found)}, the config asks for {list(expected)}"
                )

    @abstractmethod
    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        """Read a tensor (or a slice of its first axis) as a dense CPU tensor of `dtype`; raises as `shape` does.

        It may share its memory with others that were read: nobody writes into it.

        Raises:
            ValueError: the file is truncated or its data are malformed; the sentence names file and tensor.
        """

    def joined(self, names: Sequence[str], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
        """The named tensors one below the other, in memory of their own; raises as `get` does.

        Filled in place: no moment holds the checkpoint twice.
        """
        import torch

        shapes = [self.shape(name) for name in names]
        joined = torch.empty((sum(shape[0] for shape in shapes), *shapes[0][1:]), dtype=dtype, device=device)
        row = 0
        for name, shape in zip(names, shapes, strict=True):
            joined[row : row + shape[0]] = self.get(name, dtype)
            row += shape[0]
        return joined

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as it is stored, for who multiplies blocks; None if it isn't stored so. Raises as `get` does."""
        return None

    def scaled(self, name: str) -> Scaled | None:
        """A matrix as it is stored, for who multiplies FP8; None if it isn't stored so. Raises as `get` does."""
        return None

    @abstractmethod
    def digest(self) -> str:
        """A short stable name of these weights (of the header and file sizes, not of every byte)."""

    @abstractmethod
    def close(self) -> None:
        """Release files and mappings. Tensors handed out stay valid."""


class WeightLoader(ABC):
    """Reads one file format, and the configuration and tokenizer that come with it."""

    @abstractmethod
    def recognizes(self, path: Path) -> bool:
        """Whether `path` (a file or a folder) is of this format; looks at names and magic bytes only."""

    def formats(self, path: Path) -> Mapping[str, int]:
        """How many weights of matrices are kept in which format, such as Q4_1; empty if that isn't told.

        Reads the header only and must not import torch. Raises as `config` does.
        """
        return {}

    @abstractmethod
    def config(self, path: Path) -> dict[str, Any]:
        """The model's `config.json`, or its equivalent made from the file's metadata. Must not import torch.

        Raises:
            ValueError: the file is malformed; the sentence names it and what is wrong.
        """

    @abstractmethod
    def tokenizer(self, path: Path) -> Tokenizer:
        """The model's tokenizer with its chat template. Must not import torch. Raises as `config` does."""

    @abstractmethod
    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        """Open the weights; raises as `config` does."""


BUILDS: Final = WeightLoader


@hookspec
def weight_loaders() -> Iterable[Offer[WeightLoader]]:  # type: ignore[empty-body]
    """Offer weight loaders. Must not import torch."""


__all__ = ["API", "HOOK", "Blocks", "Scaled", "WeightLoader", "WeightSource", "weight_loaders"]
