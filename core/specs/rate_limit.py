"""Extension point: rate limiters, which decide whether a key may send a request now.

Called by the HTTP process when a request begins and whenever it got tokens; must not block. Time is passed in, so that
a limiter has no clock of its own.

Threads: the event loop's thread, one call at a time.

Errors: neither method may raise; an exception fails the request with a 500.

`build(options) -> RateLimiter`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from engine.hooks import hookspec
from engine.plugin import Offer

API: Final = 1
HOOK: Final = "rate_limits"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What a key is allowed per minute; None is without limit."""

    requests: float | None = None
    tokens: float | None = None  # prompt and output together


@dataclass(frozen=True, slots=True, kw_only=True)
class Allowance:
    """How one of the two limits stands after a decision."""

    limit: float  # at most so many at once
    remaining: float  # now; not below 0
    reset: float  # seconds until `limit` is there again


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """Whether a request may go on. Refused ones have cost nothing."""

    allowed: bool
    retry_after: float = (
        0.0  # seconds after which the same request would be let through if no other one came; 0 if it was
    )
    requests: Allowance | None = None  # None without such a limit
    tokens: Allowance | None = None


class RateLimiter(ABC):
    """Keeps account of what each key has used."""

    @abstractmethod
    def begin(self, key: str, rate: Rate, tokens: int, now: float) -> Verdict:
        """Ask for one request with a prompt of so many tokens, and charge both if it is let through.

        Args:
            key: name of the key; the account.
            rate: its limits, always the same for one key.
            tokens: of the prompt. More than the limit must be let through when nothing was used for long.
            now: seconds, never less than in an earlier call.
        """

    @abstractmethod
    def spend(self, key: str, rate: Rate, tokens: int, now: float) -> None:
        """Charge tokens that a request was let through for and that were not known when it began: its output."""


BUILDS: Final = RateLimiter


@hookspec
def rate_limits() -> Iterable[Offer[RateLimiter]]:  # type: ignore[empty-body]
    """Offer rate limiters. Must not import torch."""


__all__ = ["API", "HOOK", "Allowance", "Rate", "RateLimiter", "Verdict", "rate_limits"]
