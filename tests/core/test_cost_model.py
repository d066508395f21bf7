"""Where a prompt is computed: learned curves, and the regret of deciding by them."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from statistics import mean

import pytest

from engine.cost_model import Curve, Measured, Side, Weigher

KV_BYTES = 131_072
"""Of one token: 32 layers, 8 KV heads, 128 wide, bfloat16."""


def measured(*points: tuple[float, float], age: float = 0.0) -> Measured:
    return Measured(points, age)


def test_a_curve_learns_and_interpolates() -> None:
    curve = Curve()
    for size, seconds in ((0, 9.0), (100, 1.0), (1000, 10.0), (1000, 10.0), (3000, 30.0)):
        curve.add(size, seconds, now=5.0)
    told = Measured.of(curve.as_dict(now=7.0))
    assert told == measured((100, 1.0), (1000, 10.0), (3000, 30.0), age=2.0)
    assert told.seconds(50) == pytest.approx(0.5)
    assert told.seconds(550) == pytest.approx(5.5)
    assert told.seconds(6000) == pytest.approx(60.0)
    assert told.per_second == pytest.approx(100.0)


def test_a_curve_follows_what_changes() -> None:
    curve = Curve()
    for _ in range(20):
        curve.add(1000, 1.0, now=0.0)
    for _ in range(20):
        curve.add(1000, 3.0, now=0.0)
    assert Measured.of(curve.as_dict(0.0)).seconds(1000) == pytest.approx(3.0, rel=0.01)


def test_a_larger_size_never_takes_less_than_the_largest_measured() -> None:
    assert measured((100, 2.0), (200, 1.0)).seconds(400) == 1.0


ODD = [[1], [1, 2, 3], ["a", "b"], [0, 1], [1, None], [float("nan"), 1], 7]


@pytest.mark.parametrize(
    "told", [None, {}, "curve", {"points": 3}, {"points": [], "age": "old"}, *({"points": [point]} for point in ODD)]
)
def test_what_another_server_tells_may_be_anything(told: object) -> None:
    assert Measured.of(told).seconds(100) is None
    assert Measured.of(told).per_second is None


def test_old_measurements_are_hoped_to_be_better_now() -> None:
    old = measured((100, 8.0), age=600.0)
    assert old.seconds(100) == 8.0
    assert old.hoped(100) == pytest.approx(2.0)


HERE = Side(prefill=measured((1000, 1.0)), cached=0)
SLOW, FAST = measured((1000, 2.0)), measured((1000, 0.01))


def test_the_cheaper_side_is_taken() -> None:
    weigher = Weigher(stall_weight=1.0)
    assert not weigher.choose(1000, here=HERE, there=HERE, link=SLOW, streams=0).remote
    assert not weigher.choose(1000, here=HERE, there=HERE, link=FAST, streams=0).remote
    choice = weigher.choose(1000, here=HERE, there=HERE, link=FAST, streams=1)
    assert choice.remote
    assert (choice.local_seconds, choice.remote_seconds) == (pytest.approx(2.0), pytest.approx(1.01))
    assert weigher.choose(1000, here=HERE, there=HERE, link=SLOW, streams=3).remote
    assert not Weigher(stall_weight=0.0).choose(1000, here=HERE, there=HERE, link=FAST, streams=9).remote


def test_queues_and_cached_prefixes_count() -> None:
    weigher = Weigher(stall_weight=1.0)
    queued = Side(prefill=HERE.prefill, cached=0, queue=5.0)
    warm = Side(prefill=HERE.prefill, cached=900)
    assert not weigher.choose(1000, here=HERE, there=queued, link=FAST, streams=1).remote
    assert weigher.choose(1000, here=queued, there=HERE, link=FAST, streams=0).remote
    assert not weigher.choose(1000, here=warm, there=HERE, link=FAST, streams=1).remote
    assert weigher.choose(1000, here=HERE, there=warm, link=FAST, streams=0).remote


def test_what_was_never_measured_is_tried_with_short_prompts_first() -> None:
    weigher, unknown = Weigher(stall_weight=1.0), measured()
    assert weigher.choose(500, here=HERE, there=HERE, link=unknown, streams=0).remote
    longs = [weigher.choose(5000, here=HERE, there=HERE, link=unknown, streams=0).remote for _ in range(20)]
    assert not longs[0]
    assert longs[-1]
    blank = Side(prefill=unknown, cached=0)
    assert not weigher.choose(5000, here=blank, there=HERE, link=FAST, streams=0).remote


@dataclass
class World:
    """Two engines and a link, whose true speeds nobody tells."""

    gigabits: float
    rng: random.Random
    here: Curve = field(default_factory=Curve)
    there: Curve = field(default_factory=Curve)
    link: Curve = field(default_factory=Curve)

    def prefill(self, tokens: int) -> float:
        """An 8B model on a fast GPU: linear, and quadratic for attention; noisy."""
        return (0.008 + tokens * 6e-5 + tokens**2 * 1.5e-9) * self.rng.uniform(0.9, 1.1)

    def transfer(self, tokens: int) -> float:
        return (0.002 + tokens * KV_BYTES * 8 / (self.gigabits * 1e9)) * self.rng.uniform(0.9, 1.1)

    def one(self, weigher: Weigher, now: float) -> tuple[float, float]:
        """A request: what it cost as decided, and what the better choice would have cost."""
        tokens = int(2 ** self.rng.uniform(6, 13))
        streams = self.rng.choice([0, 0, 1, 2, 8, 30])
        cached = int(tokens * self.rng.choice([0.0, 0.0, 0.5, 0.9]))
        queue = self.rng.choice([0.0, 0.0, 0.1, 0.5])
        own, theirs, moved = self.prefill(tokens - cached), self.prefill(tokens), self.transfer(tokens - cached)
        costs = {False: own * (1 + streams), True: queue + theirs + moved}
        told = [Measured.of(curve.as_dict(now)) for curve in (self.here, self.there, self.link)]
        choice = weigher.choose(
            tokens,
            here=Side(prefill=told[0], cached=cached),
            there=Side(prefill=told[1], cached=0, queue=queue),
            link=told[2],
            streams=streams,
        )
        if choice.remote:
            self.there.add(tokens, theirs, now)
            self.link.add(tokens - cached, moved, now)
        else:
            self.here.add(tokens - cached, own, now)
        return costs[choice.remote], min(costs.values())


@pytest.mark.parametrize("gigabits", [0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0])
def test_the_regret_is_at_most_a_tenth(gigabits: float) -> None:
    regrets = []
    for seed in range(3):
        world, weigher = World(gigabits, random.Random(seed)), Weigher(stall_weight=1.0)
        costs = [world.one(weigher, now=number * 0.5) for number in range(1000)]
        regrets.append(sum(cost for cost, _ in costs) / sum(best for _, best in costs) - 1)
    assert mean(regrets) <= 0.10, regrets
