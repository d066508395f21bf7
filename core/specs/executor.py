"""Extension point: executors, which decide where the model's ranks run.

`build(options, *, make_runner: Callable[[], Runner]) -> Executor`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    from engine.batch import StepBatch, StepResult

API: Final = 1
HOOK: Final = "executors"


class Pending(ABC):
    """A launched step."""

    @abstractmethod
    def result(self) -> StepResult:
        """Wait for the step; raises what it raised."""


class Executor(ABC):
    """Runs steps in the order in which they were launched."""

    @abstractmethod
    def launch(self, batch: StepBatch) -> Pending:
        """Queue one step and return at once."""

    @abstractmethod
    def close(self) -> None:
        """Wait for what was launched and release threads, processes and memory."""


@hookspec
def executors() -> Iterable[Offer[Executor]]:  # type: ignore[empty-body]
    """Offer executors. Must not import torch."""


__all__ = ["API", "HOOK", "Executor", "Pending", "executors"]
