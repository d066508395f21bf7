"""The account that keeps speculation from costing time: what may be lost is a small share of the time, and no more.

Every step pays in a little; a drafted step pays for what it lost against plain steps, or brings in what it won. Whoever
is in debt does not draft. So the time lost over any stretch is at most that share of it, and what was in the account.
"""

from __future__ import annotations

from typing import Final

_MOST: Final = 2.0
"""Plain steps that the account can hold: past wins don't pay for long losses."""

_BEGIN: Final = 1.0


class Account:
    """In plain steps.

    Args:
        share: of the time that may be lost.
    """

    def __init__(self, share: float) -> None:
        self.balance = _BEGIN
        self._share = share

    def earn(self) -> None:
        """A step has passed."""
        self.balance = min(self.balance + self._share, _MOST)

    def settle(self, ratio: float, tokens: float) -> None:
        """A step took as long as `ratio` plain steps, and each of its requests got `tokens` on average."""
        self.balance = min(self.balance + tokens - ratio, _MOST)


__all__ = ["Account"]
