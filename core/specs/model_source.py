"""Extension point: model sources, which turn `SCHEME:REST` of the YAML into files on this machine.

Called once at start-up, before anything is loaded.

Threads: `resolve` runs once, on the main thread, before the engine core starts; it may take minutes if it reports
progress.

Errors: FileNotFoundError or another OSError, or ValueError for a malformed rest; the sentence becomes the program's.

`build(options) -> ModelSource`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from engine.hooks import hookspec
from engine.plugin import Offer

API: Final = 1
HOOK: Final = "model_sources"

Progress = Callable[[float, str], None]
"""Called with the share done (0..1) and a few words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where a model lies: a folder in the Hugging Face layout, or one file (GGUF)."""

    path: Path
    name: str  # what clients may call the model unless the YAML says otherwise


class ModelSource(ABC):
    """Resolves one scheme."""

    @abstractmethod
    def resolve(self, rest: str, progress: Progress) -> ModelFiles:
        """Make the files available locally.

        Raises:
            FileNotFoundError: with a sentence that says what was looked for, where, and how to get it.
        """


BUILDS: Final = ModelSource


@hookspec
def model_sources() -> Iterable[Offer[ModelSource]]:  # type: ignore[empty-body]
    """Offer model sources; the offer's name is the scheme. Must not import torch."""


__all__ = ["API", "HOOK", "ModelFiles", "ModelSource", "Progress", "model_sources"]
