"""Extension point: executors, which decide where the model's ranks run.

Threads: `build`, `launch`, `result` and `close` are called on the engine core's main thread. `make_runner` and every
`runner.step` run on one other thread (or in other processes), in the order of `launch`.

Errors: what `make_runner` raises comes out of `build`, with nothing left behind. What a step raises comes out of its
`result`, each time it is asked; later steps run all the same.

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


BUILDS: Final = Executor


@hookspec
def executors() -> Iterable[Offer[Executor]]:  # type: ignore[empty-body]
    """Offer executors. Must not import torch."""


__all__ = ["API", "HOOK", "Executor", "Pending", "executors"]
