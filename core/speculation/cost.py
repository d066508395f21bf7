"""What drafting costs: how much longer a step takes with so many draft tokens in it, in plain steps.

    seconds(rows, tokens, depth) = plain(rows) * (verified(rows, tokens) + drafted(rows, depth))

All three are measured. `plain` is a step without drafts, scheduled ahead if the engine can; `verified` is 1 for such a
step, more for one that waits for the tokens of the step before, and rises with the draft tokens; `drafted` is the time
that the speculator takes, as far as it is told apart. The latter two are relative, so that they hold when the machine
or the texts get slower, and kept for each doubling of the rows.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final

from engine.speculation.curve import KNOTS, Curve

_SAMPLES: Final = 8
"""Plain steps after which one of so many rows counts as known."""

_BRIGHT: Final = 0.5
"""Share of the rise so far that is expected to go on."""


class StepCosts:
    """Learned from every step without prompts."""

    def __init__(self) -> None:
        self._plain = Curve()
        self._verified: defaultdict[int, Curve] = defaultdict(lambda: Curve(at_zero=1.0))
        self._drafted: defaultdict[int, Curve] = defaultdict(lambda: Curve(at_zero=0.0))

    def knows(self, rows: int) -> bool:
        """Whether enough plain steps of so many requests were measured."""
        return self._plain.samples(rows) >= _SAMPLES

    def plain(self, rows: int) -> float:
        """Seconds of a plain step; 0 if none was ever measured."""
        return self._plain.at(rows) or 0.0

    def reach(self, rows: int) -> int:
        """Most draft tokens measured in a step of about so many rows."""
        return self._verified[_octave(rows)].reach

    def ratio(self, rows: int, tokens: int, depth: int) -> float:
        """Duration of a step with `tokens` draft tokens, `depth` of one request at most, in plain steps.

        Beyond what was measured it is a guess on the bright side, since the way to find out is to try: no more until
        every request had a draft token, for it may be the waiting that costs and not the tokens; then half the rise.
        """
        verified = self._verified[_octave(rows)]
        reach = verified.reach
        ratio = verified.at(min(tokens, reach)) or 1.0
        if tokens > reach >= rows:
            ratio += _BRIGHT * (ratio - 1.0) * (tokens - reach) / reach
        return ratio + (self._drafted[_octave(rows)].at(depth) or 0.0)

    def break_even(self, rows: int) -> float:
        """Tokens of a plain step that a draft token costs, in steps with as many of them as is cheapest."""
        curve = self._verified[_octave(rows)]
        sizes = [knot for knot in KNOTS if 0 < knot <= curve.reach] or [1]
        return max(0.0, min((self.ratio(rows, size, -(-size // rows)) - 1.0) * rows / size for size in sizes))

    def learn_plain(self, rows: int, seconds: float) -> None:
        """A step without drafts took so long."""
        self._plain.learn(rows, seconds)

    def learn(self, rows: int, tokens: int, depth: int, seconds: float, drafting: float) -> None:
        """A step that waited for drafts took so long, `drafting` seconds of it to make them."""
        if plain := self.plain(rows):
            self._verified[_octave(rows)].learn(tokens, max(0.0, seconds - drafting) / plain)
            if depth:
                self._drafted[_octave(rows)].learn(depth, drafting / plain)


def _octave(rows: int) -> int:
    return rows.bit_length()


__all__ = ["StepCosts"]
