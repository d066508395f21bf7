"""Whom to draft for and how much: the draft tokens that make the step emit the most tokens per second.

A draft token is worth its chance to be kept, and worth less than the one before it. So the best n of a step are the n
likeliest, whosever they are, and only n has to be found (Leviathan et al., 2023, for one request; here for a batch).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

from engine.speculation.curve import KNOTS


class Choice(NamedTuple):
    """Draft lengths in the order of the requests, and what they are expected to do, measured in plain steps."""

    lengths: list[int]
    profit: float = 0.0  # tokens more than a plain step's, by request
    cost: float = 0.0  # time more than a plain step's

    @property
    def gain(self) -> float:
        """Tokens per second, relative to a plain step."""
        return (1.0 + self.profit) / (1.0 + self.cost)


def choose(survival: Sequence[Sequence[float]], rows: int, ratio: Callable[[int, int], float], most: int) -> Choice:
    """The best draft lengths; all 0 if none pays.

    Args:
        survival: for each request, the chances that its first, first two, … draft tokens are kept.
        rows: requests in the step, those that can't be drafted for included.
        ratio: duration of the step with so many draft tokens and so many of one request, in plain steps.
        most: draft tokens that the step may have.
    """
    ranked = sorted(
        ((chance, -place, request) for request, chances in enumerate(survival) for place, chance in enumerate(chances)),
        reverse=True,
    )[:most]
    worth = list(accumulate(chance for chance, _, _ in ranked))
    depths = list(accumulate((1 - place for _, place, _ in ranked), max))
    most, best = 0, Choice([0] * len(survival))
    for tokens in _sizes(len(ranked)):
        found = Choice(best.lengths, worth[tokens - 1] / rows, max(ratio(tokens, depths[tokens - 1]) - 1.0, 0.0))
        if found.gain > best.gain:
            most, best = tokens, found
    for _, _, request in ranked[:most]:
        best.lengths[request] += 1
    return best


def _sizes(most: int) -> list[int]:
    """Numbers of draft tokens to look at: costs are straight lines between knots, so the best is at a knot or close."""
    return [*(knot for knot in KNOTS if 0 < knot < most), *([most] if most else [])]


__all__ = ["Choice", "choose"]
