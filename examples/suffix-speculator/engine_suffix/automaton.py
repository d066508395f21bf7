"""A suffix automaton: every substring of a growing text, found in time linear in the substring.

Blumer et al., "The smallest automaton recognizing the subwords of a text" (1985). A state stands for the substrings
that end at the same places; its link leads to the longest of their suffixes that ends elsewhere too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

ROOT: Final = 0


class SuffixAutomaton:
    """Over token ids; amortized constant time a token."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]
        self._link: list[int | None] = [None]
        self._length: list[int] = [0]  # of the longest substring of the state
        self._end: list[int] = [0]  # where its first occurrence ends: the position after it
        self._last = ROOT

    def append(self, token: int) -> None:
        """Grow the text by one token."""
        self.tokens.append(token)
        new = self._state({}, self._length[self._last] + 1, len(self.tokens))
        at: int | None = self._last
        while at is not None and token not in self._next[at]:
            self._next[at][token] = new
            at = self._link[at]
        self._link[new] = ROOT if at is None else self._split(at, token)
        self._last = new

    def recurrence(self) -> tuple[int, int]:
        """Length of the longest suffix of the text that occurs earlier, and the position after its first occurrence."""
        link = self._link[self._last] or ROOT
        return self._length[link], self._end[link]

    def find(self, text: Sequence[int]) -> tuple[int, int]:
        """The same for the longest suffix of another text that occurs in this one."""
        state, length = ROOT, 0
        for token in text:
            while state != ROOT and token not in self._next[state]:
                state = self._link[state] or ROOT
                length = self._length[state]
            if token in self._next[state]:
                state, length = self._next[state][token], length + 1
        return length, self._end[state]

    def _split(self, at: int, token: int) -> int:
        """The state that stands for exactly the suffix of `at` and `token`, cut off from a longer one if need be."""
        target = self._next[at][token]
        if self._length[target] == self._length[at] + 1:
            return target
        clone = self._state(dict(self._next[target]), self._length[at] + 1, self._end[target])
        self._link[clone] = self._link[target]
        self._link[target] = clone
        walk: int | None = at
        while walk is not None and self._next[walk].get(token) == target:
            self._next[walk][token] = clone
            walk = self._link[walk]
        return clone

    def _state(self, follows: dict[int, int], length: int, end: int) -> int:
        self._next.append(follows)
        self._link.append(None)
        self._length.append(length)
        self._end.append(end)
        return len(self._next) - 1
