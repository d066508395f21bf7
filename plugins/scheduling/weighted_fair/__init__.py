"""Tenants share the engine by their weights."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.request import Request
from engine.specs.scheduling import PrefixLength, SchedulingPolicy


class WeightedFair(SchedulingPolicy):
    """Who got least for its weight goes first; requests of one tenant go by arrival.

    Each tenant has a counter of the tokens computed for it, divided by its weight: the virtual token counter of Sheng
    et al., "Fairness in Serving Large Language Models" (2024). A tenant that comes back after a pause starts at the
    counter of those who are there, so that silence earns no credit. Preemption goes by arrival: taking pages from
    whoever is ahead would only have them computed again, and two tenants would take them from each other in turn.
    """

    def __init__(self) -> None:
        self._counters: defaultdict[str, float] = defaultdict(float)
        self._waited: set[str] = set()  # tenants in the queue when it was last ordered
        self._level = 0.0  # counter of the tenant that was served last

    def order(self, waiting: Sequence[Request], now: float, cached: PrefixLength) -> Sequence[Request]:
        by_arrival = sorted(waiting, key=lambda request: request.arrival)
        self._welcome({request.tenant for request in by_arrival})
        ahead = dict(self._counters)  # as if each request had been served once it was given its place
        place: dict[str, float] = {}
        for request in by_arrival:
            place[request.id] = ahead[request.tenant]
            ahead[request.tenant] += len(request.tokens) / request.weight
        return sorted(by_arrival, key=lambda request: place[request.id])

    def served(self, request: Request, tokens: int) -> None:
        self._counters[request.tenant] += tokens / request.weight
        self._level = self._counters[request.tenant]

    def victim(self, running: Sequence[Request], beneficiary: Request) -> Request:
        return max([*running, beneficiary], key=lambda request: request.arrival)

    def _welcome(self, tenants: set[str]) -> None:
        """Lift those who are new in the queue to the least of those who were there before, or of who was served."""
        stayed = [self._counters[tenant] for tenant in tenants & self._waited]
        level = min(stayed, default=self._level)
        for tenant in tenants - self._waited:
            self._counters[tenant] = max(self._counters[tenant], level)
        self._waited = tenants


def build(options: Options) -> SchedulingPolicy:
    """Make the policy."""
    return WeightedFair()


@hookimpl
def scheduling_policies() -> list[Offer[SchedulingPolicy]]:
    """The policy that shares between API keys."""
    summary = "API keys share the engine by their weights, in tokens"
    return [Offer(name="weighted_fair", summary=summary, build=build)]
