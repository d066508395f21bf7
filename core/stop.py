"""Stop strings, found across any split of the text."""

from __future__ import annotations

from collections.abc import Sequence


def _failure(word: str) -> list[int]:
    """Knuth-Morris-Pratt: for each prefix length, that of its longest border (a proper prefix that is a suffix)."""
    table = [0] * (len(word) + 1)
    length = 0
    for i in range(1, len(word)):
        while length and word[i] != word[length]:
            length = table[length]
        length += word[i] == word[length]
        table[i + 1] = length
    return table


class StopMatcher:
    """Passes text through, holding back only what may be the beginning of a stop string.

    The stop string that is complete first ends the text; of several complete at the same character, the longest. After
    that `matched` names it and nothing more may be pushed. Costs O(characters x stop strings), whatever the split.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._words = sorted(stops, key=len, reverse=True)
        self._tables = [_failure(word) for word in self._words]
        self._include = include
        self._states = [0] * len(self._words)  # characters at the end of the text that begin each word
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """Take more text; returns what may be shown now. While not `armed`, a complete stop string is ordinary text."""
        assert self.matched is None, "the text has ended"
        buffer = self._held + text
        for end in range(len(self._held), len(buffer)):
            word = self._advance(buffer[end])
            if word is not None and armed:
                self.matched, self._held = word, ""
                return buffer[: end + 1 if self._include else end + 1 - len(word)]
        keep = max(self._states, default=0)
        self._held = buffer[len(buffer) - keep :]
        return buffer[: len(buffer) - keep]

    def flush(self) -> str:
        """No more text comes: what was held back."""
        held, self._held = self._held, ""
        return held

    def _advance(self, char: str) -> str | None:
        """Feed one character to every word; returns the longest word that it completes."""
        found = None
        for i, word in enumerate(self._words):
            length, table = self._states[i], self._tables[i]
            while length and word[length] != char:
                length = table[length]
            if word[length] == char:
                length += 1
            if length == len(word):
                found = found or word
                length = table[length]
            self._states[i] = length
        return found


__all__ = ["StopMatcher"]
