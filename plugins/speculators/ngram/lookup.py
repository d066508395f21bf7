"""The index of a request's n-grams and the drafts read off it: pure Python, once a step on the scheduler's thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.specs.speculator import Draft, DraftContext, Speculator

CANDIDATES: Final = 8
"""Earlier occurrences compared in one look-up, latest first. It bounds a look-up in text that repeats one n-gram."""


class History:
    """Where each n-gram of one growing token sequence was followed by something.

    Occurrences of the shortest n-gram are chained from the latest to the first, as in a Lempel-Ziv match finder: one
    dictionary serves every longer n-gram too, since those are found by comparing backwards.
    """

    __slots__ = ("_earlier", "_latest", "_max", "_min")

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        self._latest: dict[tuple[int, ...], int] = {}
        self._earlier: list[int | None] = []  # for the n-gram before position p, at p - min_match: the one before it

    def learn(self, tokens: Sequence[int]) -> None:
        """Index what was appended since the last call; O(new tokens)."""
        if len(tokens) < self._min + len(self._earlier):  # another sequence: an append-only one never shrinks
            self._latest.clear()
            self._earlier.clear()
        for follower in range(self._min + len(self._earlier), len(tokens)):
            gram = tuple(tokens[follower - self._min : follower])
            self._earlier.append(self._latest.get(gram))
            self._latest[gram] = follower

    def follower(self, tokens: Sequence[int]) -> int | None:
        """Position after the longest earlier occurrence of the end of `tokens`, the latest of equals; None if new."""
        at = self._latest.get(tuple(tokens[-self._min :]))
        best, longest = at, 0
        for _ in range(CANDIDATES):
            if at is None or longest == self._max:
                break
            if (length := self._agreement(tokens, at)) > longest:
                best, longest = at, length
            at = self._earlier[at - self._min]
        return best

    def _agreement(self, tokens: Sequence[int], at: int) -> int:
        length = self._min
        while length < min(self._max, at) and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        return length


class NgramSpeculator(Speculator):
    """Keeps one `History` per request from its first proposal to `forget`."""

    def __init__(self, min_match: int, max_match: int) -> None:
        self._min, self._max = min_match, max_match
        self._histories: dict[str, History] = {}

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """See `Speculator.propose`."""
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        tokens = context.tokens
        history = self._histories.setdefault(context.request_id, History(self._min, self._max))
        history.learn(tokens)
        start = history.follower(tokens)
        if start is None:
            return Draft()
        return Draft(continuation(tokens, start, context.max_tokens))

    def forget(self, request_id: str) -> None:
        """See `Speculator.forget`; unknown ids are no news."""
        self._histories.pop(request_id, None)


def continuation(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """`count` tokens from `start` on; past the end it goes on with what it read, so that a period is continued."""
    drafts: list[int] = []
    for at in range(start, start + count):
        drafts.append(tokens[at] if at < len(tokens) else drafts[at - len(tokens)])
    return drafts


__all__ = ["History", "NgramSpeculator", "continuation"]
