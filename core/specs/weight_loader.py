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
from collections.abc import Iterable, Mapping
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


BUILDS: Final = WeightLoader


@hookspec
def weight_loaders() -> Iterable[Offer[WeightLoader]]:  # type: ignore[empty-body]
    """Offer weight loaders. Must not import torch."""


__all__ = ["API", "HOOK", "WeightLoader", "WeightSource", "weight_loaders"]
