"""Whether two components can be parts of one engine: one function, which composing refuses by and the matrix prints."""

from __future__ import annotations

from typing import Any, NamedTuple

from engine.capabilities import disjoint, unmet
from engine.plugin import Offer
from engine.registry import noun


class Placed(NamedTuple):
    """An offer and the extension point it is of."""

    point: str
    offer: Offer[Any]

    def __str__(self) -> str:
        return f"the {noun(self.point)} {self.offer.name!r}"


def clashes(one: Placed, other: Placed) -> list[str]:
    """Why `one` can't be in an engine with `other`, whatever the model and the configuration; empty when it can.

    They clash when a limit that both declare has no value in common, or when either requires of the other what it
    lacks. The answer is empty for (a, b) just when it is for (b, a); the sentences are about `one`.
    """
    reasons = [f"{limit} of {other}" for limit in disjoint(one.offer.capabilities, other.offer.capabilities)]
    if asked := other.offer.requires.get(one.point):
        reasons += [f"{lack}, which {other} requires" for lack in unmet(one.offer.capabilities, asked)]
    if wanted := one.offer.requires.get(other.point):
        reasons += [f"{other} {lack}" for lack in unmet(other.offer.capabilities, wanted)]
    return reasons


__all__ = ["Placed", "clashes"]
