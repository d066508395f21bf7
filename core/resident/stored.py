"""Which items of a resident's KV exist, by slot and by page.

A page's flag says that the items of all its computed tokens are stored, whoever computed them: a prefix hit then finds
the draft KV too. What the target computed without the resident, or what came from another engine, has none. Behind such
a hole a resident begins anew at the next page, and sees nothing before it.
"""

from __future__ import annotations

import numpy as np

from engine.batch import Admission, Entry


class Stored:
    """The books of one runner.

    Args:
        pages: of the target's pool.
        catches_up: holes are filled later, since the resident needs nothing but tokens.
    """

    def __init__(self, *, slots: int, pages: int, page_size: int, catches_up: bool) -> None:
        self._page_size, self._catches_up = page_size, catches_up
        self._complete = np.zeros(pages, dtype=np.bool_)
        self._cached: list[int | None] = [None] * slots  # of slots that were admitted and not followed since
        self.first = [0] * slots  # the first item that the slot's request may see; at the beginning of a page
        self.end = [0] * slots  # one behind its last item

    def admit(self, admission: Admission) -> None:
        """A slot begins anew."""
        self._cached[admission.slot] = admission.cached

    def ready(self, entry: Entry) -> bool:
        """Whether the items of all tokens before the entry's first are stored, the last of them for this request."""
        slot = entry.slot
        return self._cached[slot] is None and self.first[slot] < self.end[slot] == entry.start

    def begin(self, entry: Entry, table: np.ndarray) -> int:
        """The first position whose item is missing and can be stored, now that the target computes this entry.

        Args:
            table: the slot's block table.
        """
        slot, start, size = entry.slot, entry.start, self._page_size
        if (cached := self._cached[slot]) is not None:
            self._cached[slot] = None
            self._look_back(slot, cached, start, table)
        if self.end[slot] != start and not self._catches_up:
            self.first[slot] = self.end[slot] = -(-max(start, self.end[slot]) // size) * size
        return self.end[slot]

    def _look_back(self, slot: int, cached: int, start: int, table: np.ndarray) -> None:
        """What a request finds at its first entry: items of its cached prefix, as far as the flags tell."""
        size = self._page_size
        pages = table[: -(-start // size)]
        self._complete[pages[cached // size :]] = False  # computed elsewhere, or without the resident
        holes = np.flatnonzero(~self._complete[pages])
        self.first[slot], self.end[slot] = 0, start
        if len(holes) and self._catches_up:
            self.end[slot] = int(holes[0]) * size
        elif len(holes):
            self.first[slot] = (int(holes[-1]) + 1) * size
            self.end[slot] = max(start, self.first[slot])

    def store(self, slot: int, begin: int, stop: int, table: np.ndarray) -> None:
        """The items from `begin` to `stop` are stored."""
        self._complete[table[begin // self._page_size : -(-stop // self._page_size)]] = True
        self.end[slot] = stop

    def skip(self, entry: Entry, table: np.ndarray) -> None:
        """The target has computed the entry without the resident."""
        end = entry.start + entry.count
        self._complete[table[entry.start // self._page_size : -(-end // self._page_size)]] = False

    def skip_all(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, tables: np.ndarray) -> None:
        """The same for positions of many slots, int64 [R] each."""
        self._complete[tables[slots, starts // self._page_size]] = False
        for slot, start, end in zip(*(x[ends - starts > 1] for x in (slots, starts, ends)), strict=True):
            self._complete[tables[slot, start // self._page_size : -(-end // self._page_size)]] = False


__all__ = ["Stored"]
