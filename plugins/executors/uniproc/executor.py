"""One rank on one thread. Steps run in the order of their launch; torch's per-thread settings are the runner's own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.batch import StepBatch, StepResult
from engine.runner import Runner
from engine.specs.executor import Executor, Pending


class FuturePending(Pending):
    """A step on the thread."""

    def __init__(self, future: Future[StepResult]) -> None:
        self._future = future

    def result(self) -> StepResult:
        return self._future.result()


class UniprocExecutor(Executor):
    """Owns the thread; whatever `make_runner` raises comes out of the constructor, with the thread gone."""

    def __init__(self, make_runner: Callable[[], Runner]) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="runner")
        try:
            self._runner = self._thread.submit(make_runner).result()
        except BaseException:
            self._thread.shutdown()
            raise

    def launch(self, batch: StepBatch) -> Pending:
        return FuturePending(self._thread.submit(self._runner.step, batch))

    def close(self) -> None:
        self._thread.shutdown()


__all__ = ["UniprocExecutor"]
