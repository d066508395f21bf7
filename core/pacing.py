"""How many prompt tokens a step may compute beside its decodes without keeping their clients waiting.

Every stream gets its next token with the next step, so the duration of a step is what its clients feel. It is estimated
from the steps before:

    seconds = base + row * rows + token * tokens

with a row for each entry, and the tokens behind the first of each entry. Attention makes a token dearer the more come
before it: by a share per position that follows from the shape of the model. An error of the estimate is made good by a
factor to each cost, the larger the more of the step that cost stands for (exponentiated gradient; J. Kivinen and M. K.
Warmuth, 1997). So costs stay positive, and it matters not what their scale is.

Knows no request and no device. Called by the scheduler and the engine on their thread, a few times a step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.batch import Entry

LEAST: Final = 16
"""Prompt tokens that are computed in a step however long it takes, so that every prompt gets on."""

_MARGIN: Final = 0.9
"""Share of the target that a step is planned to take, since steps of equal work differ a little."""

_RATE: Final = 0.5
"""How much of an error in the logarithm of a step's duration is made good at once."""

Work = tuple[float, float, float]
"""What a step consists of: 1, rows, and tokens behind the first of each row, weighed by where they stand."""


def work(entries: Sequence[Entry], slope: float) -> Work:
    """What the entries of a step amount to; those with a single token come first, so it costs no look at them.

    Args:
        slope: by which share of itself a token gets dearer with each position before it.
    """
    tokens = 0.0
    for entry in reversed(entries):
        if entry.count == 1:
            break
        tokens += (entry.count - 1) * (1 + slope * (entry.start + entry.count / 2))
    return 1.0, float(len(entries)), tokens


class StepCost:
    """The three costs, in seconds, as far as they are known."""

    def __init__(self) -> None:
        self.costs = [0.0] * 3

    def of(self, done: Work) -> float:
        """Estimated seconds of a step."""
        return sum(cost * amount for cost, amount in zip(self.costs, done, strict=True))

    def learn(self, done: Work, seconds: float) -> None:
        """A step took so long. One far from what was expected counts as e times off: it may have been a hiccup."""
        expected = self.of(done)
        if not expected:
            _, rows, tokens = done
            self.costs = [seconds / 2, *[seconds / 2 / max(1.0, rows + tokens)] * 2]
            return
        error = max(-1.0, min(math.log(max(seconds, 1e-9) / expected), 1.0))
        shares = [cost * amount / expected for cost, amount in zip(self.costs, done, strict=True)]
        self.costs = [cost * math.exp(_RATE * share * error) for cost, share in zip(self.costs, shares, strict=True)]


class Room:
    """What is left of a step for prompts; this one sets no bound of its own."""

    spent = False

    def tokens(self, start: int) -> int | None:
        """How many tokens from position `start` on still fit; None: any number."""
        return None

    def take(self, entry: Entry) -> None:
        """The entry is part of the step."""


class TimedRoom(Room):
    """So many seconds, and `most` tokens."""

    def __init__(self, cost: StepCost, slope: float, seconds: float, most: int) -> None:
        self._cost, self._slope, self._seconds, self._most = cost, slope, seconds, most

    def tokens(self, start: int) -> int:
        """See `Room.tokens`; `LEAST` at least, so that whoever asks before it is spent gets on."""
        _, row, token = self._cost.costs
        seconds = self._seconds - row
        if seconds <= 0:
            return LEAST
        # token * (slope / 2 * n² + (1 + slope * start) * n) = seconds, solved without dividing by the slope
        linear = token * (1 + self._slope * start)
        divisor = linear + math.sqrt(linear * linear + 2 * token * self._slope * seconds)
        fit = int(2 * seconds / divisor) if divisor > 0 else self._most
        return max(LEAST, min(fit, self._most))

    def take(self, entry: Entry) -> None:
        """Its time is gone."""
        self._seconds -= self._cost.of((0.0, *work([entry], self._slope)[1:]))
        self._most -= entry.count
        self.spent = self._seconds <= 0 or self._most <= 0


class Pacing:
    """No target: prompts fill the token budget."""

    def now(self) -> float:
        """Seconds, to be given to `measured` with the step that begins now."""
        return 0.0

    def room(self, decodes: Sequence[Entry]) -> Room:
        """What is left for prompts beside the decodes of a step."""
        return Room()

    def measured(self, entries: Sequence[Entry], began: float) -> None:
        """The result of a step that began then has just come in."""

    def stats(self) -> dict[str, Any]:
        """For metrics; empty without a target."""
        return {}


class LatencyTarget(Pacing):
    """Prompts are cut so that no step with decodes in it takes longer than a target.

    Args:
        seconds: the target.
        slope: by which share of itself a token gets dearer with each position before it.
        clock: monotonic seconds.
    """

    def __init__(self, seconds: float, slope: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.target, self.cost = seconds, StepCost()
        self._slope, self._clock = slope, clock
        self._largest = 4 * LEAST  # tokens in the largest step measured
        self._last = -math.inf
        self._mixed = self._late = 0

    def now(self) -> float:
        """See `Pacing.now`."""
        return self._clock()

    def room(self, decodes: Sequence[Entry]) -> Room:
        """See `Pacing.room`. Without decodes nobody waits, and there is no bound. Steps at most double, since beyond
        what was measured an estimate is a guess."""
        if not decodes:
            return Room()
        seconds = _MARGIN * self.target - self.cost.of(work(decodes, self._slope))
        return TimedRoom(self.cost, self._slope, seconds, 2 * self._largest)

    def measured(self, entries: Sequence[Entry], began: float) -> None:
        """See `Pacing.measured`. Steps run one after the other: one that was launched early began when the one before
        ended."""
        now = self.now()
        took, self._last = now - max(began, self._last), now
        done = work(entries, self._slope)
        self.cost.learn(done, took)
        self._largest = max(self._largest, int(done[2]))
        if done[2] and entries[0].count == 1:
            self._mixed += 1
            self._late += took > self.target

    def stats(self) -> dict[str, Any]:
        """Seconds of the target and of each cost; steps of decodes and prompts, and how many took longer."""
        costs = dict(zip(("base", "row", "token"), self.cost.costs, strict=True))
        return {"target": self.target, "mixed_steps": self._mixed, "late_steps": self._late, "costs": costs}


__all__ = ["LEAST", "LatencyTarget", "Pacing", "Room", "StepCost", "TimedRoom", "work"]
