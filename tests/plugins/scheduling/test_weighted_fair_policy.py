"""Weighted fair queueing: through the shared suite, alone, and in an engine over the toy device."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.plugins.scheduling import weighted_fair
from engine.request import Request
from engine.testing.scheduling import SchedulingConformance, make_request


def ask(name: str, tenant: str, arrival: float, weight: float = 1.0) -> Request:
    request = make_request(name, arrival)
    request.tenant, request.weight = tenant, weight
    return request


def names(order) -> list[str]:
    return [request.id for request in order]


class TestWeightedFair(SchedulingConformance):
    (offer,) = weighted_fair.scheduling_policies()
    module = "engine.plugins.scheduling.weighted_fair"

    def test_a_flood_of_one_tenant_does_not_delay_another(self) -> None:
        flood = [ask(f"a{i}", "a", float(i)) for i in range(50)]
        order = names(self.policy().order([*flood, ask("b0", "b", 60.0)], 61.0, lambda request: 0))
        assert order.index("b0") == 1

    def test_who_got_less_for_its_weight_goes_first(self) -> None:
        policy = self.policy()
        one, two = ask("one", "a", 0.0, weight=4.0), ask("two", "b", 1.0)
        policy.order([one, two], 2.0, lambda request: 0)
        policy.served(one, 300)
        policy.served(two, 100)
        assert names(policy.order([two, one], 2.0, lambda request: 0)) == ["one", "two"]
        policy.served(one, 200)
        assert names(policy.order([one, two], 2.0, lambda request: 0)) == ["two", "one"]

    def test_silence_earns_no_credit(self) -> None:
        policy = self.policy()
        busy = [ask(f"a{i}", "a", float(i)) for i in range(40)]
        policy.order(busy, 1.0, lambda request: 0)
        for request in busy[:20]:
            policy.served(request, 1000)
        late = [ask(f"b{i}", "b", 100.0 + i) for i in range(20)]
        order = names(policy.order([*busy[20:], *late], 200.0, lambda request: 0))
        assert Counter(name[0] for name in order[:10]) == {"a": 5, "b": 5}


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_contending_tenants_get_their_shares(weight: float) -> None:
    """A closed loop of three requests each for two places: the served tokens come to the weights."""
    policy, waiting, served = TestWeightedFair().policy(), [], Counter[str]()
    for i in range(3):
        waiting += [ask(f"a{i}", "a", float(i), weight), ask(f"b{i}", "b", float(i))]
    for turn in range(400):
        request = policy.order(waiting, 10.0 + turn, lambda request: 0)[0]
        waiting.remove(request)
        policy.served(request, 3 + 20)
        served[request.tenant] += 23
        waiting.append(ask(f"{request.tenant}-{turn}", request.tenant, 10.0 + turn, request.weight))
    assert served["a"] / served["b"] == pytest.approx(weight, rel=0.05)
