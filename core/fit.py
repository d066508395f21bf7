"""Whether two components can be parts of one engine: one function, which composing refuses by and the matrix prints."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from engine.capabilities import Capabilities, disjoint, unmet
from engine.plugin import Offer
from engine.registry import noun
from engine.specs.model import ANY_ARCHITECTURE, ModelOffer


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
    reasons = [f"{limit} of {other}" for limit in disjoint(declared(one.offer), declared(other.offer))]
    if asked := other.offer.requires.get(one.point):
        reasons += [f"{lack}, which {other} requires" for lack in unmet(one.offer.capabilities, asked)]
    if wanted := one.offer.requires.get(other.point):
        reasons += [f"{other} {lack}" for lack in unmet(other.offer.capabilities, wanted)]
    return reasons


def declared(offer: Offer[Any]) -> Capabilities:
    """What an offer declares; of a model also the architectures that it implements, unless it takes any."""
    if isinstance(offer, ModelOffer) and ANY_ARCHITECTURE not in offer.architectures:
        return replace(offer.capabilities, architectures=offer.architectures)
    return offer.capabilities


__all__ = ["Placed", "clashes", "declared"]
