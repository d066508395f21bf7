"""Conformance of scheduling policies: the order is complete, choosing a victim ends, and equals don't starve."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.specs.scheduling import SchedulingPolicy
from engine.testing.offer import OfferConformance

FIELDS = st.tuples(st.integers(0, 5), st.integers(-2, 2), st.integers(0, 3))  # arrival, priority, cached pages


def make_request(name: str, arrival: float = 0.0, priority: int = 0) -> Request:
    """A waiting request; nothing but what a policy may look at means anything."""
    return Request(
        id=name,
        tokens=[1, 2, 3],
        prompt_len=3,
        params=SamplingParams(),
        seed=0,
        max_len=8,
        eos=frozenset(),
        arrival=arrival,
        priority=priority,
    )


def make_queue(fields: Sequence[tuple[int, int, int]]) -> tuple[list[Request], dict[str, int]]:
    """Requests of these fields, and how many tokens of each are cached."""
    queue = [make_request(f"r{i}", float(arrival), priority) for i, (arrival, priority, _) in enumerate(fields)]
    return queue, {f"r{i}": 16 * pages for i, (_, _, pages) in enumerate(fields)}


class SchedulingConformance(OfferConformance):
    """Subclasses set `offer` and `module`. A policy may look at a request's arrival, priority, tokens and salt."""

    patience: float = 60.0
    """Seconds after which a request must be served before any later one of the same priority."""

    most_lookups: int = 1000
    """How many of ten thousand waiting requests may be looked up in the KV cache for one order."""

    def policy(self) -> SchedulingPolicy:
        """A policy with the options of the suite."""
        policy = self.offer.build(self.options())
        assert isinstance(policy, SchedulingPolicy)
        return policy

    def test_the_order_is_a_permutation(self) -> None:
        """Nobody is lost or doubled, the queue itself stays as it is, and the same queue gives the same order."""

        @settings(max_examples=100, deadline=None, database=None)
        @given(st.lists(FIELDS, max_size=12))
        def check(fields: list[tuple[int, int, int]]) -> None:
            queue, cached = make_queue(fields)
            before, policy = list(queue), self.policy()
            order = list(policy.order(queue, 6.0, lambda request: cached[request.id]))
            assert sorted(r.id for r in order) == sorted(r.id for r in before)
            assert queue == before
            assert list(policy.order(queue, 6.0, lambda request: cached[request.id])) == order

        check()

    def test_the_victim_is_one_of_those_asked_about(self) -> None:
        """With nobody running, the beneficiary itself yields."""

        @settings(max_examples=100, deadline=None, database=None)
        @given(st.lists(FIELDS, min_size=1, max_size=8))
        def check(fields: list[tuple[int, int, int]]) -> None:
            beneficiary, *running = make_queue(fields)[0]
            for others in (running, [*running, beneficiary]):
                assert self.policy().victim(others, beneficiary) in [*running, beneficiary]

        check()
        request = make_request("only")
        assert self.policy().victim([], request) is request

    def test_preemption_comes_to_an_end(self) -> None:
        """Of two requests one always yields, else they would take each other's pages in turn without getting on."""

        @settings(max_examples=100, deadline=None, database=None)
        @given(FIELDS, FIELDS)
        def check(one: tuple[int, int, int], two: tuple[int, int, int]) -> None:
            (a, b), _ = make_queue([one, (two[0] + 10, *two[1:])])
            policy = self.policy()
            assert policy.victim([a], b) is policy.victim([b], a)

        check()

    def test_equals_do_not_starve(self) -> None:
        """One with nothing cached against a stream of younger ones that are cached: after the patience it is first."""
        old = make_request("old")
        now = self.patience + 1.0
        queue = [*(make_request(f"young {i}", arrival=now - 0.01 * i) for i in range(20)), old]
        assert self.policy().order(queue, now, lambda request: 0 if request is old else 1600)[0] is old

    def test_a_long_queue_is_not_looked_up_in_the_cache(self) -> None:
        """Each look-up costs a walk over the prompt, on the scheduler's thread, at every step."""
        queue = [make_request(f"r{i}", float(i)) for i in range(10_000)]
        asked: list[str] = []

        def cached(request: Request) -> int:
            asked.append(request.id)
            return 0

        assert len(self.policy().order(queue, 10_000.0, cached)) == 10_000
        assert len(asked) <= self.most_lookups

    @pytest.mark.parametrize("size", [0, 1])
    def test_tiny_queues(self, size: int) -> None:
        """Nothing to order."""
        queue = [make_request("a")][:size]
        assert list(self.policy().order(queue, 1.0, lambda request: 0)) == queue


__all__ = ["SchedulingConformance", "make_request"]
