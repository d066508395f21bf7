"""Requests whose prefix is cached go first, but nobody waits for ever."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Flag, Needs, Offer, Options
from engine.request import Request
from engine.specs.scheduling import PrefixLength, SchedulingPolicy


class PrefixAwareOptions(Options):
    """The YAML section."""

    patience: float = Field(5.0, ge=0, description="Seconds after which a request goes before all younger ones.")
    longest_queue: int = Field(128, gt=0, description="Waiting requests beyond which the order is by arrival alone.")


class PrefixAware(SchedulingPolicy):
    """The longest cached prefix first: it costs least, and its pages are there now. Matching each waiting request has a
    price, so a long queue is served in order of arrival."""

    def __init__(self, options: PrefixAwareOptions) -> None:
        self._options = options

    def order(self, waiting: Sequence[Request], now: float, cached: PrefixLength) -> Sequence[Request]:
        by_arrival = sorted(waiting, key=lambda request: request.arrival)
        if len(waiting) > self._options.longest_queue:
            return by_arrival
        overdue = [r for r in by_arrival if now - r.arrival >= self._options.patience]
        others = by_arrival[len(overdue) :]
        return overdue + sorted(others, key=lambda request: -cached(request))

    def victim(self, running: Sequence[Request], beneficiary: Request) -> Request:
        return max([*running, beneficiary], key=lambda request: request.arrival)


def build(options: PrefixAwareOptions) -> SchedulingPolicy:
    """Make the policy."""
    return PrefixAware(options)


@hookimpl
def scheduling_policies() -> list[Offer[SchedulingPolicy]]:
    """The policy that asks the KV cache."""
    summary = "The longest cached prefix first, with a limit on waiting"
    reuse = Needs(flags=frozenset({Flag.PREFIX_REUSE}))  # else the order is by arrival, at the price of looking
    return [
        Offer(
            name="prefix_aware",
            summary=summary,
            build=build,
            options=PrefixAwareOptions,
            requires={"kv_caches": reuse},
        )
    ]
