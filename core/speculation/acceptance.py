"""How likely draft tokens are to be kept: by request and place in the draft, and by length of the context.

A token counts as tried if all before it were kept. What a request has shown weighs with what requests of about its
length have shown, and that with the place before. Old news fades.
"""

from __future__ import annotations

from typing import Final

CONTEXTS: Final = (256, 1024, 4096, 16384)
"""Bounds of the context lengths that are told apart, in tokens."""

_FIRST: Final = 0.5
"""Chance of a first draft token before anything is known."""

_OWN_MEMORY, _OWN_PRIOR = 0.9, 3.0
_LENGTH_MEMORY, _LENGTH_PRIOR = 0.98, 2.0


def context_bucket(tokens: int) -> int:
    """Index of the range of lengths."""
    return sum(tokens >= bound for bound in CONTEXTS)


def context_name(bucket: int) -> str:
    """The range for people and metrics: `0-255`, …, `16384-`."""
    low = CONTEXTS[bucket - 1] if bucket else 0
    return f"{low}-{CONTEXTS[bucket] - 1}" if bucket < len(CONTEXTS) else f"{low}-"


class Tally:
    """Faded counts of tokens tried and kept, by place."""

    __slots__ = ("kept", "memory", "tried")

    def __init__(self, places: int, memory: float) -> None:
        self.tried, self.kept = [0.0] * places, [0.0] * places
        self.memory = memory

    def learn(self, drafted: int, accepted: int) -> None:
        """A draft of so many tokens was verified."""
        for place in range(min(drafted, accepted + 1, len(self.tried))):
            self.tried[place] = self.tried[place] * self.memory + 1
            self.kept[place] = self.kept[place] * self.memory + (place < accepted)

    def fade(self) -> None:
        """Time has passed without news."""
        self.tried = [count * self.memory for count in self.tried]
        self.kept = [count * self.memory for count in self.kept]

    def chance(self, place: int, prior: float, weight: float) -> float:
        """Chance that the token at this place is kept if those before it are."""
        return (self.kept[place] + weight * prior) / (self.tried[place] + weight)


class Acceptance:
    """Estimates for every request.

    Args:
        places: most draft tokens of a request.
    """

    def __init__(self, places: int) -> None:
        self._places = places
        self._requests: dict[str, Tally] = {}
        self._lengths = [Tally(places, _LENGTH_MEMORY) for _ in range(len(CONTEXTS) + 1)]

    def survival(self, request_id: str, context: int, places: int) -> list[float]:
        """Chance that the first, the first two, … of `places` draft tokens are kept; `context` in tokens."""
        own = self._requests.get(request_id)
        alike = self._lengths[context_bucket(context)]
        chances, survives, prior = [], 1.0, _FIRST
        for place in range(min(places, self._places)):
            prior = alike.chance(place, prior, _LENGTH_PRIOR)
            survives *= own.chance(place, prior, _OWN_PRIOR) if own else prior
            chances.append(survives)
        return chances

    def learn(self, request_id: str, context: int, drafted: int, accepted: int) -> None:
        """A draft of a request was verified."""
        own = self._requests.get(request_id)
        if own is None:
            own = self._requests[request_id] = Tally(self._places, _OWN_MEMORY)
        own.learn(drafted, accepted)
        self._lengths[context_bucket(context)].learn(drafted, accepted)

    def passed_over(self, request_id: str) -> None:
        """Others were drafted for and this one wasn't: what it has shown fades, so that it gets another chance."""
        if own := self._requests.get(request_id):
            own.fade()

    def forget(self, request_id: str) -> None:
        """The request is gone."""
        self._requests.pop(request_id, None)


__all__ = ["CONTEXTS", "Acceptance", "Tally", "context_bucket", "context_name"]
