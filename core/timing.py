"""Where the time of each request goes: queue, prefill, decode, and what held it up.

Follows the same events as the observers do, on the scheduler's thread; a step costs one call, whatever is in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from engine.batch import StepBatch
from engine.messages import FinishReason, Output, Timing
from engine.specs.observer import RequestEvent, Stage

_SMOOTHING: Final = 0.1
"""Weight of the newest decode step in the running mean of their durations."""


@dataclass(slots=True)
class _Life:
    """Times of one request, in seconds of the monotonic clock; None for stations that it hasn't reached."""

    queued: float
    admitted: float | None = None
    first_token: float | None = None
    parted: float | None = None  # preempted, and not back yet
    preemptions: int = 0
    preempted: float = 0.0
    stalls_before: float = 0.0  # of all steps, when its first token came
    steps_before: int = 0


class Timekeeper:
    """Knows the times of the requests under way, and what is to be told of them after this step."""

    def __init__(self) -> None:
        self._lives: dict[str, _Life] = {}
        self._news: dict[str, Timing] = {}
        self._last: float | None = None  # when the step before came in
        self._decode: float | None = None  # mean duration of a step without a prompt
        self._stalls = 0.0  # by how much steps with a prompt took longer, since the start
        self._steps = 0

    def follow(self, event: RequestEvent) -> None:
        """Take in one event."""
        if event.stage is Stage.QUEUED:
            self._lives[event.request_id] = _Life(event.time)
        elif (life := self._lives.get(event.request_id)) is None:
            return
        elif event.stage is Stage.ADMITTED:
            life.admitted = event.time
        elif event.stage is Stage.FIRST_TOKEN:
            life.first_token = event.time
            life.stalls_before, life.steps_before = self._stalls, self._steps
            if life.admitted is not None:
                self._news[event.request_id] = self._sum(life, life.admitted, event.time)
        elif event.stage is Stage.PREEMPTED:
            life.preemptions += 1
            life.parted = event.time
        elif event.stage is Stage.RESUMED:
            self._reunite(life, event.time)
        else:
            del self._lives[event.request_id]
            self._news.pop(event.request_id, None)
            if event.reason != FinishReason.ABORT and life.admitted is not None:  # nobody hears of an abort
                self._news[event.request_id] = self._sum(life, life.admitted, event.time)

    def step(self, batch: StepBatch, now: float) -> None:
        """A step's result is here; call it before the step is committed. `now` is monotonic seconds."""
        took = 0.0 if self._last is None else now - self._last
        self._last = now
        self._steps += 1
        if not _has_prompt(batch):
            self._decode = took if self._decode is None else self._decode + _SMOOTHING * (took - self._decode)
        elif self._decode is not None:
            self._stalls += max(0.0, took - self._decode)

    def stamp(self, outputs: Sequence[Output]) -> list[Output]:
        """The outputs of a step, with timing on the first and on the last of each request.

        The first has it too, since whoever finds a stop string ends the request and never sees the last.
        """
        news, self._news = self._news, {}
        if not news:
            return list(outputs)
        return [
            msgspec.structs.replace(output, timing=timing) if (timing := news.get(output.request_id)) else output
            for output in outputs
        ]

    def _sum(self, life: _Life, admitted: float, end: float) -> Timing:
        self._reunite(life, end)
        first = end if life.first_token is None else life.first_token
        decoded = life.first_token is not None
        return Timing(
            queue=admitted - life.queued,
            prefill=first - admitted,
            decode=end - first,
            preemptions=life.preemptions,
            preempted=life.preempted,
            stalled=min(end - first, self._stalls - life.stalls_before) if decoded else 0.0,
            steps=self._steps - life.steps_before if decoded else 0,
        )

    @staticmethod
    def _reunite(life: _Life, now: float) -> None:
        if life.parted is not None:
            life.preempted += now - life.parted
            life.parted = None


def _has_prompt(batch: StepBatch) -> bool:
    """Whether part of a prompt is computed in the step. Entries with a single token come first, so this is quick."""
    for entry in reversed(batch.entries):
        if entry.count == 1:
            return False
        if entry.count - len(entry.drafts) > 1:
            return True
    return False


__all__ = ["Timekeeper"]
