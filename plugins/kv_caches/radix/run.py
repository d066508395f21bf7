"""Tokens of a request as bytes, packed only where they are looked at: a miss on a long prompt reads one page."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Final

TOKEN_BYTES: Final = 8


class Run:
    """The pages `first`, …, `last` - 1 of a sequence of tokens."""

    def __init__(self, tokens: Sequence[int], page_size: int, first: int, last: int) -> None:
        self.first, self.last = first, last
        self._tokens, self._size = tokens, page_size

    def pages(self, first: int, last: int) -> bytes:
        """The tokens of some of its pages."""
        return array("q", self._tokens[first * self._size : last * self._size]).tobytes()


__all__ = ["TOKEN_BYTES", "Run"]
