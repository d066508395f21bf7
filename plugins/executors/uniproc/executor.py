"""One rank on one thread. Steps run in the order of their launch; torch's per-thread settings are the runner's own."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.batch import StepBatch, StepResult
from engine.runner import Runner
from engine.specs.executor import Executor, Pending

log = logging.getLogger(__name__)


class FuturePending(Pending):
    """A step on the thread, and then perhaps on the device."""

    def __init__(self, future: Future[Callable[[], StepResult]]) -> None:
        self._future = future

    def result(self) -> StepResult:
        return self._future.result()()


class UniprocExecutor(Executor):
    """Owns the thread; whatever `make_runner` raises comes out of the constructor, with the thread gone."""

    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        self._closing = False
        try:
            self._runner = self._thread.submit(make_runner).result()
        except BaseException:
            self._thread.shutdown()
            raise
        self._thread.submit(self._improve)

    def launch(self, batch: StepBatch) -> Pending:
        return FuturePending(self._thread.submit(self._runner.launch, batch))

    def _improve(self) -> None:
        """Runs between steps, each time behind those that were launched meanwhile."""
        try:
            if not self._closing and self._runner.improve():
                self._thread.submit(self._improve)
        except Exception:
            log.exception("the runner could not prepare a faster way; steps go on as they are")

    def close(self) -> None:
        self._closing = True
        self._thread.submit(lambda: None).result()  # what `_improve` submits, it has submitted by now
        self._thread.shutdown()


__all__ = ["UniprocExecutor"]
