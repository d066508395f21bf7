"""A growing text in which ends of other texts are found: pure Python, constant time a token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

CANDIDATES: Final = 16
"""Occurrences compared in one look-up, the latest first. It bounds a look-up in text that repeats one n-gram."""


class Occurrence(NamedTuple):
    """Where the end of a text was found."""

    after: int  # position behind it
    agrees: int  # tokens, as far as that was looked at


class Text:
    """Occurrences of each n-gram of the least length are chained from the latest to the first."""

    __slots__ = ("_earlier", "_latest", "_max", "_min", "tokens")

    def __init__(self, min_match: int, max_match: int) -> None:
        self.tokens: list[int] = []
        self._min, self._max = min_match, max_match
        self._latest: dict[tuple[int, ...], int] = {}  # n-gram -> position after its latest occurrence
        self._earlier: list[int | None] = []  # for the n-gram before each position: where the one before it ended

    def append(self, token: int) -> None:
        """Grow by a token."""
        self.tokens.append(token)
        if len(self.tokens) < self._min:
            self._earlier.append(None)
            return
        gram = tuple(self.tokens[-self._min :])
        self._earlier.append(self._latest.get(gram))
        self._latest[gram] = len(self.tokens)

    def occurrences(self, end: Sequence[int]) -> Iterator[Occurrence]:
        """Where the last tokens of `end` stand in this text with something behind them, the latest first."""
        at = self._latest.get(tuple(end[-self._min :])) if len(end) >= self._min else None
        looked = 0
        while at is not None and looked < CANDIDATES:
            if at < len(self.tokens):
                yield Occurrence(at, self._agreement(end, at))
                looked += 1
            at = self._earlier[at - 1]

    def _agreement(self, end: Sequence[int], after: int) -> int:
        length, most = self._min, min(self._max, after, len(end))
        while length < most and self.tokens[after - 1 - length] == end[-1 - length]:
            length += 1
        return length


__all__ = ["CANDIDATES", "Occurrence", "Text"]
