"""Conformance of executors, with runners that compute nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import ClassVar

import pytest

from engine.batch import EntryResult, StepBatch, StepResult
from engine.specs.executor import Executor
from engine.testing.offer import OfferConformance

BROKEN = -1
"""A step of this number raises."""


class EchoRunner:
    """Answers each step with its number; keeps account of where it was called."""

    patience = 30.0

    def __init__(self) -> None:
        self.threads = {threading.get_ident()}
        self.numbers: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def step(self, batch: StepBatch) -> StepResult:
        """Wait for the gate, then answer."""
        self.gate.wait(self.patience)
        self.threads.add(threading.get_ident())
        self.numbers.append(batch.number)
        if batch.number == BROKEN:
            raise RuntimeError("the device is on fire")
        return StepResult([EntryResult([batch.number])])

    def launch(self, batch: StepBatch) -> Callable[[], StepResult]:
        """Answer at once, to be asked for later."""
        result = self.step(batch)
        return lambda: result

    def improve(self) -> bool:
        """There is nothing to improve."""
        self.threads.add(threading.get_ident())
        return False


class UnmadeRunner(EchoRunner):
    """Its weights don't fit."""

    def __init__(self) -> None:
        raise MemoryError("no room for the weights")


def step(number: int) -> StepBatch:
    """An empty step."""
    return StepBatch(number=number, admissions=[], entries=[])


class ExecutorConformance(OfferConformance):
    """Subclasses set `offer` and `module`. For executors whose ranks are threads of this process."""

    patience: ClassVar[float] = 30.0
    """Seconds that a step waits at a closed gate."""

    def start(self, runner: type[EchoRunner] = EchoRunner) -> tuple[Executor, EchoRunner]:
        """An executor and the runner it made."""
        made: list[EchoRunner] = []

        def make_runner() -> EchoRunner:
            made.append(runner())
            made[-1].patience = self.patience
            return made[-1]

        executor = self.offer.build(self.options(), make_runner=make_runner)
        assert isinstance(executor, Executor)
        assert len(made) == 1
        return executor, made[0]

    def test_steps_run_in_the_order_of_their_launch(self) -> None:
        """Whatever the order in which results are asked for."""
        executor, runner = self.start()
        pending = [executor.launch(step(n)) for n in range(20)]
        assert [p.result().entries[0].tokens for p in reversed(pending)] == [[n] for n in reversed(range(20))]
        assert runner.numbers == list(range(20))
        executor.close()

    def test_launch_does_not_wait(self) -> None:
        """The next step is scheduled while one runs."""
        executor, runner = self.start()
        runner.gate.clear()
        pending = [executor.launch(step(n)) for n in range(3)]
        assert runner.numbers == []
        runner.gate.set()
        assert [p.result().entries[0].tokens for p in pending] == [[0], [1], [2]]
        executor.close()

    def test_a_runner_lives_on_one_thread_and_not_on_the_callers(self) -> None:
        """So that torch's per-thread settings hold, and the caller's thread stays free."""
        executor, runner = self.start()
        for number in range(3):
            executor.launch(step(number)).result()
        assert len(runner.threads) == 1
        assert threading.get_ident() not in runner.threads
        executor.close()

    def test_what_a_step_raises_comes_out_of_its_result_alone(self) -> None:
        """Again at each call; the steps after it run."""
        executor, _ = self.start()
        first, broken, last = (executor.launch(step(n)) for n in (1, BROKEN, 3))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="the device is on fire"):
                broken.result()
        assert (first.result().entries[0].tokens, last.result().entries[0].tokens) == ([1], [3])
        executor.close()

    def test_a_runner_that_cannot_be_made_leaves_nothing_behind(self) -> None:
        """The error comes out of `build`."""
        before = threading.active_count()
        with pytest.raises(MemoryError, match="no room for the weights"):
            self.start(UnmadeRunner)
        assert threading.active_count() == before

    def test_close_finishes_what_was_launched_and_ends_the_threads(self) -> None:
        """Nothing that was launched is lost."""
        before = threading.active_count()
        executor, runner = self.start()
        pending = [executor.launch(step(n)) for n in range(5)]
        executor.close()
        assert threading.active_count() == before
        assert runner.numbers == list(range(5))
        assert pending[4].result().entries[0].tokens == [4]


__all__ = ["EchoRunner", "ExecutorConformance"]
