"""First come, first served."""

from __future__ import annotations

from collections.abc import Sequence

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.request import Request
from engine.specs.scheduling import PrefixLength, SchedulingPolicy


class FirstComeFirstServed(SchedulingPolicy):
    """By arrival; who came last yields."""

    def order(self, waiting: Sequence[Request], now: float, cached: PrefixLength) -> Sequence[Request]:
        return sorted(waiting, key=lambda request: request.arrival)

    def victim(self, running: Sequence[Request], beneficiary: Request) -> Request:
        return max([*running, beneficiary], key=lambda request: request.arrival)


def build(options: Options) -> SchedulingPolicy:
    """Make the policy."""
    return FirstComeFirstServed()


@hookimpl
def scheduling_policies() -> list[Offer[SchedulingPolicy]]:
    """The default policy."""
    return [Offer(name="fcfs", summary="First come, first served", build=build)]
