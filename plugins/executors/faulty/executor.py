"""An executor that does what another does, but for the faults of its script."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engine.batch import StepBatch, StepResult
from engine.faults import Trigger, kill
from engine.plugins.executors.faulty import StepFault
from engine.specs.executor import Executor, Pending


class FaultyPending(Pending):
    """A step with the faults that strike it."""

    def __init__(self, inner: Pending, faults: Sequence[StepFault]) -> None:
        self._inner = inner
        self._faults = list(faults)

    def result(self) -> StepResult:
        result = self._inner.result()
        for fault in self._faults:
            _strike(fault, result)
        return result


class FaultyExecutor(Executor):
    """Faults strike when the result of a step is asked for; the steps themselves run as they should."""

    def __init__(self, inner: Executor, faults: Sequence[StepFault]) -> None:
        self._inner = inner
        self._script = [(fault, Trigger(fault)) for fault in faults]

    def launch(self, batch: StepBatch) -> Pending:
        striking = [fault for fault, trigger in self._script if trigger.fires()]
        pending = self._inner.launch(batch)
        return FaultyPending(pending, striking) if striking else pending

    def close(self) -> None:
        self._inner.close()


def _strike(fault: StepFault, result: StepResult) -> None:
    sampled = next((entry for entry in result.entries if entry.tokens), None)
    match fault.kind:
        case "nan" if sampled is not None:
            sampled.tokens, sampled.failed = [], True
        case "corrupt" if sampled is not None:
            sampled.tokens[0] = sampled.tokens[0] - 1 if sampled.tokens[0] else 1
        case "delay":
            time.sleep(fault.seconds)
        case "raise":
            raise RuntimeError("injected fault: the step failed")
        case "kill":
            kill()


__all__ = ["FaultyExecutor", "FaultyPending"]
