"""The controller against devices whose times are told and drafts whose fate is drawn: no clock, no sleep, no model.

What is compared is tokens per second with those of the same device without speculation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from engine.speculation.controller import Controller, State
from engine.speculation.lengths import Candidate, DraftedStep

MOST = 4
NEVER_SLOWER = 0.97


@dataclass
class Device:
    """A plain step takes `plain(rows)` seconds; `cost(rows, tokens)` is what draft tokens add to it, in plain steps."""

    plain: Callable[[int], float]
    cost: Callable[[int, int], float]
    waiting: float = 0.04  # what a step costs more for not being scheduled ahead
    noise: float = 0.05
    hiccups: float = 0.0  # share of steps that take five times as long


CPU = Device(lambda rows: 8e-3 * (1 + 0.35 * (rows - 1)), lambda rows, n: 0.12 * n if rows == 1 else 0.8 * n / rows)
GPU = Device(lambda rows: 5e-3 * (1 + 0.004 * rows), lambda rows, n: 0.01 * n / (1 + 0.004 * rows))

Kept = Callable[[int, int], float]
"""Step and request -> chance that a draft token is kept if those before it are."""


@dataclass
class World:
    """Requests that decode for ever."""

    device: Device
    rows: int
    kept: Kept
    proposes: Kept = lambda step, row: 1.0  # chance that there is a draft at all
    resident: bool = False
    seed: int = 0
    speed: list[float] = field(default_factory=list)  # of each step, in plain tokens per plain second
    states: list[State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.controller = Controller(MOST, 0.01, resident=self.resident)
        self.rng = random.Random(self.seed)
        self.names = [f"r{row}" for row in range(self.rows)]
        self.time = self.tokens = 0.0
        self.alarm_at: int | None = None
        self.waited = False

    def run(self, steps: int) -> float:
        """Speed over so many steps, relative to plain ones."""
        time, tokens = self.time, self.tokens
        for _ in range(steps):
            self.step()
        hiccups = 1 + 4 * self.device.hiccups
        return (self.tokens - tokens) * self.device.plain(self.rows) * hiccups / self.rows / (self.time - time)

    def step(self) -> None:
        plain = self.device.plain(self.rows) * self.jitter()
        followed = (
            [self.controller.follows(name, fresh=not self.states) for name in self.names] if self.resident else []
        )
        plain *= 1 + 0.03 * sum(followed) / self.rows
        if self.controller.awake and self.controller.due(self.names, self.rows):
            self.drafted(plain)
        else:
            self.controller.plain(self.rows, None if self.waited else plain)
            self.pass_by(plain, 0)
            self.waited = False
        self.states.append(self.controller.state)
        if self.controller.alarm.ringing and self.alarm_at is None:
            self.alarm_at = len(self.states)

    def drafted(self, plain: float) -> None:
        lengths = self.controller.lengths([Candidate(name, 100, MOST) for name in self.names], self.rows)
        outcomes = [self.verify(row, length) for row, length in enumerate(lengths)]
        drafted, accepted = sum(d for d, _ in outcomes), sum(a for _, a in outcomes)
        seconds = plain * (1 + self.device.waiting + self.device.cost(self.rows, drafted))
        step = DraftedStep(self.rows, drafted, accepted, max(d for d, _ in outcomes))
        self.controller.drafted(step, seconds, drafting=0.0)
        for name, (length, kept) in zip(self.names, outcomes, strict=True):
            if length:
                self.controller.verified(name, 100, length, kept)
        self.pass_by(seconds, accepted)
        self.waited = True

    def verify(self, row: int, length: int) -> tuple[int, int]:
        step, kept = len(self.states), 0
        if not length or self.rng.random() >= self.proposes(step, row):
            return 0, 0
        while kept < length and self.rng.random() < self.kept(step, row):
            kept += 1
        return length, kept

    def jitter(self) -> float:
        slow = 5.0 if self.rng.random() < self.device.hiccups else 1.0
        return slow * max(0.5, self.rng.gauss(1.0, self.device.noise))

    def pass_by(self, seconds: float, accepted: int) -> None:
        self.time += seconds
        self.tokens += self.rows + accepted


def always(chance: float) -> Kept:
    return lambda step, row: chance


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("resident", [False, True], ids=["host", "resident"])
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("device", [CPU, GPU], ids=["cpu", "gpu"])
def test_random_drafts_cost_next_to_nothing_and_ring_the_alarm(
    device: Device, rows: int, resident: bool, seed: int
) -> None:
    world = World(device, rows, always(0.001), resident=resident, seed=seed)
    assert world.run(200) >= NEVER_SLOWER
    assert world.alarm_at is not None
    assert world.run(400) >= 0.985
    assert set(world.states[-50:]) == {State.OFF}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("chance", [0.05, 0.15, 0.25])
@pytest.mark.parametrize("rows", [1, 16])
def test_drafts_about_the_break_even_never_cost_more_than_is_allowed(rows: int, chance: float, seed: int) -> None:
    assert World(CPU, rows, always(chance), seed=seed).run(400) >= NEVER_SLOWER


@pytest.mark.parametrize("seed", range(3))
def test_a_full_batch_that_is_bound_by_compute_is_left_alone(seed: int) -> None:
    """However good the drafts: a draft token costs as much as a request, nearly."""
    world = World(CPU, 64, always(0.7), seed=seed)
    assert world.run(300) >= NEVER_SLOWER
    assert world.states[-1] is State.OFF
    assert world.alarm_at is not None


@pytest.mark.parametrize("resident", [False, True], ids=["host", "resident"])
@pytest.mark.parametrize(
    ("device", "rows", "least"), [(CPU, 1, 1.6), (GPU, 1, 2.2), (GPU, 16, 1.45)], ids=["cpu-1", "gpu-1", "gpu-16"]
)
def test_good_drafts_are_used(device: Device, rows: int, least: float, resident: bool) -> None:
    world = World(device, rows, always(0.7), resident=resident)
    world.run(60)
    assert world.run(400) >= least
    assert world.alarm_at is None


def test_only_those_are_drafted_for_who_gain() -> None:
    world = World(GPU, 16, lambda step, row: 0.8 * (row % 2))
    world.run(200)
    candidates = [Candidate(name, 100, MOST) for name in world.names]
    assert world.controller.state is State.ON
    lengths = world.controller.lengths(candidates, 16)
    assert sum(lengths[1::2]) > 4 * sum(lengths[::2])
    assert world.run(300) >= 1.4


@pytest.mark.parametrize("seed", range(3))
def test_a_target_that_drifts_is_noticed_and_a_head_that_recovers_is_used_again(seed: int) -> None:
    def kept(step: int, row: int) -> float:
        return 0.01 if 300 <= step < 600 else 0.7

    world = World(CPU, 1, kept, seed=seed)
    assert world.run(300) >= 1.5
    assert world.run(200) >= NEVER_SLOWER - 0.01  # what was won before may be lost, up to the account's bound
    assert world.alarm_at is not None
    assert 300 < world.alarm_at <= 500
    world.run(100)
    assert world.run(100) >= 1.2
    assert world.run(300) >= 1.5
    assert not world.controller.alarm.ringing


def test_text_that_quotes_now_and_then_is_sped_up_where_it_does() -> None:
    def quotes(step: int, row: int) -> float:
        return 1.0 if step // 50 % 2 else 0.05

    world = World(CPU, 1, lambda step, row: 0.9 if step // 50 % 2 else 0.2, quotes)
    assert world.run(1000) >= 1.4


def test_hiccups_are_not_blamed_on_drafts() -> None:
    shaky = Device(CPU.plain, CPU.cost, noise=0.2, hiccups=0.02)
    world = World(shaky, 1, always(0.7))
    assert world.run(1000) >= 1.35


def test_a_machine_that_gets_slower_is_no_reason_to_stop() -> None:
    world = World(CPU, 1, always(0.7))
    world.run(200)
    world.device = Device(lambda rows: 3 * CPU.plain(rows), CPU.cost)
    world.run(200)
    assert world.run(400) >= 1.5


def test_another_batch_size_is_measured_before_it_drafts() -> None:
    """The costs of one request say nothing about sixteen."""
    controller = Controller(MOST, 0.01)
    for _ in range(20):
        controller.plain(1, 0.01)
    assert controller.due(["a"], 1)
    assert not controller.due([f"r{i}" for i in range(16)], 16)


def test_the_trace_tells_why() -> None:
    world = World(CPU, 1, lambda step, row: 0.8 if step < 100 else 0.0)
    world.run(300)
    turns = world.controller.turns()
    assert [turn["state"] for turn in turns[:2]] == ["probing", "on"]
    ends = {turn["why"] for turn in turns if turn["state"] == "off"}
    assert ends & {"no draft is expected to pay", "the account is overdrawn"}
    assert "the probe brought nothing" in ends
    assert all(turn["why"] and turn["rows"] == 1 for turn in turns)
    assert [turn["step"] for turn in turns] == sorted(turn["step"] for turn in turns)
    assert next(turn["step"] for turn in turns if turn["alarm"]) == world.alarm_at
    assert world.controller.stats()["state"] == "off"
