"""Extension point: scheduling policies, which order the waiting queue and choose whom to preempt.

Called on the scheduler's thread, once a step at most; must not block.

Threads: the scheduler's thread, one call at a time.

Errors: neither method may raise; an exception ends the engine core.

`build(options) -> SchedulingPolicy`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    from engine.request import Request

API: Final = 1
HOOK: Final = "scheduling_policies"

PrefixLength = Callable[["Request"], int]
"""How many tokens of a waiting request the KV cache holds now."""


class SchedulingPolicy(ABC):
    """Orders requests. Holds no request of its own."""

    def served(self, request: Request, tokens: int) -> None:  # noqa: B027
        """Tokens were computed for a request: those of its prompt when it was first admitted, later each of its output.

        Policies that share out the engine count here; called once per running request and step, so it must be quick.
        """

    @abstractmethod
    def order(self, waiting: Sequence[Request], now: float, cached: PrefixLength) -> Sequence[Request]:
        """The waiting requests in the order in which they should be admitted (a permutation of `waiting`)."""

    @abstractmethod
    def victim(self, running: Sequence[Request], beneficiary: Request) -> Request:
        """The running request to preempt so that `beneficiary` can go on; `beneficiary` itself if none should yield."""


BUILDS: Final = SchedulingPolicy


@hookspec
def scheduling_policies() -> Iterable[Offer[SchedulingPolicy]]:  # type: ignore[empty-body]
    """Offer scheduling policies. Must not import torch."""


__all__ = ["API", "HOOK", "PrefixLength", "SchedulingPolicy", "scheduling_policies"]
