"""The built-in scheduling policies through the shared suite, and what each is for."""

from __future__ import annotations

from engine.plugins.scheduling import fcfs, prefix_aware, priority
from engine.testing.scheduling import SchedulingConformance, make_request


def names(order) -> list[str]:
    return [request.id for request in order]


class TestFirstComeFirstServed(SchedulingConformance):
    (offer,) = fcfs.scheduling_policies()
    module = "engine.plugins.scheduling.fcfs"

    def test_by_arrival_and_the_last_yields(self) -> None:
        a, b, c = make_request("a", 3.0, priority=-9), make_request("b", 1.0), make_request("c", 2.0)
        assert names(self.policy().order([a, b, c], 9.0, lambda request: 0)) == ["b", "c", "a"]
        assert self.policy().victim([b, c], a) is a
        assert self.policy().victim([a, c], b) is a

    def test_the_cache_is_not_asked(self) -> None:
        def cached(request):
            raise AssertionError("fcfs has no use for it")

        assert names(self.policy().order([make_request("a")], 1.0, cached)) == ["a"]


class TestPriority(SchedulingConformance):
    (offer,) = priority.scheduling_policies()
    module = "engine.plugins.scheduling.priority"

    def test_lower_numbers_first_then_arrival(self) -> None:
        queue = [make_request("late", 2.0), make_request("idle", 0.0, 5), make_request("early", 1.0)]
        queue.append(make_request("urgent", 9.0, -1))
        assert names(self.policy().order(queue, 9.0, lambda request: 0)) == ["urgent", "early", "late", "idle"]

    def test_the_least_urgent_and_latest_yields(self) -> None:
        urgent, early, late = make_request("u", 9.0, -1), make_request("e", 1.0, 2), make_request("l", 2.0, 2)
        assert self.policy().victim([early, late], urgent) is late
        assert self.policy().victim([urgent, early], late) is late
        assert self.policy().victim([urgent], early) is early


class TestPrefixAware(SchedulingConformance):
    (offer,) = prefix_aware.scheduling_policies()
    module = "engine.plugins.scheduling.prefix_aware"

    def test_the_longest_cached_prefix_first_then_arrival(self) -> None:
        queue = [make_request(name, float(i)) for i, name in enumerate("abcd")]
        cached = {"a": 0, "b": 16, "c": 64, "d": 16}
        assert names(self.policy().order(queue, 4.0, lambda request: cached[request.id])) == ["c", "b", "d", "a"]

    def test_who_waited_too_long_goes_first_whatever_is_cached(self) -> None:
        queue = [make_request("new", 5.0), make_request("older", 0.5), make_request("oldest", 0.0)]
        order = self.policy().order(queue, 5.75, lambda request: 64 if request.id == "new" else 0)
        assert names(order) == ["oldest", "older", "new"]

    def test_a_queue_beyond_the_limit_is_served_by_arrival(self) -> None:
        policy = prefix_aware.build(prefix_aware.PrefixAwareOptions(longest_queue=2))
        queue = [make_request(name, float(i)) for i, name in enumerate("abc")]
        assert names(policy.order(queue, 3.0, lambda request: ord(request.id))) == ["a", "b", "c"]
        assert names(policy.order(queue[:2], 3.0, lambda request: ord(request.id))) == ["b", "a"]
