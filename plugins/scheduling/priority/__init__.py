"""By priority, then by arrival."""

from __future__ import annotations

from collections.abc import Sequence

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.request import Request
from engine.specs.scheduling import PrefixLength, SchedulingPolicy


def _rank(request: Request) -> tuple[int, float]:
    return request.priority, request.arrival


class ByPriority(SchedulingPolicy):
    """A lower number goes first; of equals, who came first. The least urgent, latest one yields."""

    def order(self, waiting: Sequence[Request], now: float, cached: PrefixLength) -> Sequence[Request]:
        return sorted(waiting, key=_rank)

    def victim(self, running: Sequence[Request], beneficiary: Request) -> Request:
        return max([*running, beneficiary], key=_rank)


def build(options: Options) -> SchedulingPolicy:
    """Make the policy."""
    return ByPriority()


@hookimpl
def scheduling_policies() -> list[Offer[SchedulingPolicy]]:
    """The policy that reads `priority` of a request."""
    return [Offer(name="priority", summary="Lower priority numbers first, then first come, first served", build=build)]
