"""Decides in each step how much is drafted for whom, down to nothing: never much slower than without speculation.

    off      plain steps; now and then, as far as the account allows,
    probing  a step in which a few requests draft one token: is it kept? If so, is drafting for all worth it?
    on       every step drafts what makes the most tokens per second, by measured costs and estimated acceptance

On ends when nothing pays any more or the account is overdrawn. It is interrupted now and then for a few plain steps, so
that what drafting is compared with is no old story. Knows no clock: durations are told.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from enum import StrEnum
from typing import Any, Final, NamedTuple

from engine.speculation.acceptance import Acceptance
from engine.speculation.account import Account
from engine.speculation.alarm import Alarm
from engine.speculation.choice import Choice, choose
from engine.speculation.cost import StepCosts
from engine.speculation.lengths import Candidate, DraftedStep, Lengths
from engine.speculation.scouts import Scouts

log = logging.getLogger(__name__)

_WORTH: Final = 1.25
"""How much more than their cost drafts must promise for speculation to be turned on."""

_LEAST: Final = 1.05
"""Tokens per second, relative to plain steps, that it takes to turn it on and to keep it on: requests that guess badly
wait for the drafts of the others, so what is gained on average has to be worth that."""

_SPACING: Final = 8
"""Fewest steps from one probe to the next, unless requests have to be watched for it anyhow."""

_PRICE, _PRICE_MEMORY = 0.3, 0.7
"""What a probe is thought to cost before the first, in plain steps; and how much of that thought outlives a probe."""

_PROBED: Final = 16
"""Requests of which one drafts in a probe."""

_STRETCH, _REFERENCE = 256, 4
"""Drafted steps in a row, and the plain ones after them."""

_HICCUP: Final = 1.5
"""How much longer than was expected a step may be taken to last."""

_TRACE: Final = 512


class State(StrEnum):
    """What the controller is doing."""

    OFF = "off"
    PROBING = "probing"
    ON = "on"


class Turn(NamedTuple):
    """A change of state or of the alarm, and what was known then."""

    step: int
    state: State
    why: str
    alarm: bool
    rows: int
    gain: float  # expected tokens per second relative to a plain step
    acceptance: float | None
    break_even: float | None
    balance: float  # of the account, in plain steps


class Controller(Lengths):
    """Adapts to what drafting costs and brings.

    Args:
        most: draft tokens of one request.
        loss: share of the time that may be lost to drafts that bring nothing.
        resident: whether the speculator has to watch a request to draft for it.
    """

    def __init__(self, most: int, loss: float, *, resident: bool = False) -> None:
        self.costs, self.acceptance, self.alarm = StepCosts(), Acceptance(most), Alarm(_WORTH)
        self.account, self.scouts = Account(loss), Scouts(resident)
        self.state = State.OFF
        self._most, self._spacing = most, 1 if resident else _SPACING
        self._steps, self._since = 0, self._spacing  # all, and those since the last probe
        self._stretch = 0  # drafted steps since speculation is on; below 0: plain ones to come
        self._turn = 0  # whose turn it is to probe
        self._price = _PRICE
        self._promising = False  # the probe's draft was kept: next, everybody may draft if that is worth it
        self._gain = 1.0
        self._trace: deque[Turn] = deque(maxlen=_TRACE)

    @property
    def awake(self) -> bool:
        """See `Lengths.awake`."""
        if self.state is State.OFF:
            return self._since >= self._spacing and self._affordable and self.scouts.armed
        return self._stretch >= 0

    def due(self, able: Sequence[str], rows: int) -> bool:
        """See `Lengths.due`; only where it is known what a plain step takes."""
        if not able or not self.awake or not self.costs.knows(rows):
            return False
        if self.state is State.OFF and any(self.scouts.ready(able)):
            self._become(State.PROBING, rows, "the account pays for a probe")
        return self.state is not State.OFF

    def lengths(self, candidates: Sequence[Candidate], rows: int) -> list[int]:
        """See `Lengths.lengths`."""
        if self.state is State.PROBING and not self._promising:
            return self._probe(candidates)
        choice = self._choose(candidates, rows)
        if self.state is State.PROBING:
            self._promising, self._stretch, self._gain = False, 0, choice.gain
            if choice.profit < _WORTH * choice.cost or choice.gain < _LEAST:
                self.alarm.probed()
                self._become(State.OFF, rows, "what the probe brought would not pay for all")
                return [0] * len(candidates)
            self._become(State.ON, rows, "the probe's draft was kept")
        elif candidates and choice.gain < _LEAST:
            self._gain = choice.gain
            self._become(State.OFF, rows, "no draft is expected to pay")
            return [0] * len(candidates)
        self._gain = choice.gain
        for candidate, length in zip(candidates, choice.lengths, strict=True):
            if not length:
                self.acceptance.passed_over(candidate.request_id)
        return choice.lengths

    def follows(self, request_id: str, fresh: bool) -> bool:
        """See `Lengths.follows`: everybody while speculation is on, scouts while it is off."""
        return self.state is not State.OFF or self.scouts.watches(request_id, fresh, self._affordable)

    def verified(self, request_id: str, context: int, drafted: int, accepted: int) -> None:
        """See `Lengths.verified`."""
        self.acceptance.learn(request_id, context, drafted, accepted)

    def plain(self, rows: int, seconds: float | None) -> None:
        """See `Lengths.plain`."""
        self._step(rows)
        self._stretch += self._stretch < 0
        if seconds is None or not rows:
            return
        if self.state is State.OFF and self.scouts.watching and self.costs.knows(rows):
            self.account.settle(min(seconds / self.costs.plain(rows), _HICCUP), 1.0)
        else:
            self.costs.learn_plain(rows, seconds)

    def drafted(self, step: DraftedStep, seconds: float | None, drafting: float) -> None:
        """See `Lengths.drafted`."""
        rows, tokens, accepted, depth, _ = step
        self._step(rows)
        self._stretch = self._stretch + 1 if self._stretch < _STRETCH else -_REFERENCE
        if seconds is None or not self.costs.plain(rows):
            if self.state is State.PROBING:
                self._become(State.OFF, rows, "the probe shared its step with prompts")
            return
        most = _HICCUP * self.costs.ratio(rows, tokens, depth)
        self.costs.learn(rows, tokens, depth, seconds, drafting)
        ratio = min(most, self.costs.ratio(rows, tokens, depth))  # as usual: hiccups are no fault of drafts
        self.account.settle(ratio, 1.0 + accepted / rows)
        if tokens:
            self.alarm.learn(tokens, accepted, self.costs.break_even(rows))
        if self.state is State.PROBING:
            self._probed(step, ratio)
        elif self.account.balance < 0 and self.state is State.ON:
            self._become(State.OFF, rows, "the account is overdrawn")

    def forget(self, request_id: str) -> None:
        """See `Lengths.forget`."""
        self.acceptance.forget(request_id)
        self.scouts.forget(request_id)

    def stats(self) -> dict[str, Any]:
        """State, expected gain, shares of draft tokens kept and to be kept, alarm, and the account in plain steps."""
        return {
            "state": self.state.value,
            "gain": self._gain if self.state is State.ON else 1.0,
            "acceptance": self.alarm.acceptance,
            "break_even": self.alarm.break_even,
            "alarm": self.alarm.ringing,
            "alarms": self.alarm.rung,
            "balance": self.account.balance,
        }

    def turns(self) -> list[dict[str, Any]]:
        """See `Lengths.turns`; JSON values only."""
        return [turn._asdict() for turn in self._trace]

    @property
    def _affordable(self) -> bool:
        return self.account.balance >= self._price

    def _step(self, rows: int) -> None:
        self._steps += 1
        self._since += 1
        self.account.earn()
        self.scouts.step()
        ringing = self.alarm.ringing
        if rows:
            self.alarm.step(self.state is State.ON, rows)
        if self.alarm.ringing != ringing:
            self._become(self.state, rows, "the alarm ends" if ringing else "alarm: drafts have not paid for long")

    def _probe(self, candidates: Sequence[Candidate]) -> list[int]:
        """One draft token for one of sixteen requests, by turns."""
        lengths = [0] * len(candidates)
        able = [i for i, ready in enumerate(self.scouts.ready(c.request_id for c in candidates)) if ready]
        for i in range(0, len(able), _PROBED):
            lengths[able[(self._turn + i) % len(able)]] = 1
        self._turn += 1
        return lengths

    def _probed(self, step: DraftedStep, ratio: float) -> None:
        self._price = _PRICE_MEMORY * self._price + (1 - _PRICE_MEMORY) * max(0.0, ratio - 1.0)
        self._since = 0
        self._promising = step.accepted > 0
        if not step.accepted:
            self.scouts.probed()
            if step.tokens or step.faults:
                self.alarm.probed()
            self._become(State.OFF, step.rows, "the probe brought nothing")

    def _choose(self, candidates: Sequence[Candidate], rows: int) -> Choice:
        """The best lengths, with at most a draft token for each request or twice what was measured."""
        survival = [self.acceptance.survival(c.request_id, c.context, min(c.room, self._most)) for c in candidates]
        most = max(rows, 2 * self.costs.reach(rows))
        return choose(survival, rows, lambda tokens, depth: self.costs.ratio(rows, tokens, depth), most)

    def _become(self, state: State, rows: int, why: str) -> None:
        self.state = state
        known = self.alarm.acceptance, self.alarm.break_even
        alarm = self.alarm.ringing
        self._trace.append(Turn(self._steps, state, why, alarm, rows, self._gain, *known, self.account.balance))
        log.debug("step %d: speculation is %s: %s", self._steps, state, why)


__all__ = ["Controller", "State", "Turn"]
