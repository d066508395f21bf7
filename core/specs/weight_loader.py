"""Extension point: weight loaders, which read one file format.

Opening a checkpoint reads its header only; tensors are read one by one when the model asks for them, under the names of
the Hugging Face checkpoint of that architecture, whatever the file calls them.

`build(options) -> WeightLoader`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
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
SECTION: Final = None


class WeightSource(ABC):
    """An open checkpoint."""

    @abstractmethod
    def names(self) -> Iterable[str]:
        """Names of all tensors, in the Hugging Face spelling."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header. Raises KeyError naming the tensor and the file when it is absent."""

    @abstractmethod
    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        """Read a tensor (or a slice of its first axis) as a dense CPU tensor of `dtype`; raises as `shape` does.

        Raises:
            ValueError: the file is truncated or its data are malformed; the sentence names file and tensor.
        """

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


@hookspec
def weight_loaders() -> Iterable[Offer[WeightLoader]]:  # type: ignore[empty-body]
    """Offer weight loaders. Must not import torch."""


__all__ = ["API", "HOOK", "SECTION", "WeightLoader", "WeightSource", "weight_loaders"]
