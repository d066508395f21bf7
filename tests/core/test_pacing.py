"""The latency target: on a device whose clock is made up, steps with decodes in them keep to it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from engine.batch import Entry, StepBatch, StepResult
from engine.engine import Engine
from engine.handover import Handover
from engine.messages import Add
from engine.observation import Observation
from engine.pacing import LEAST, LatencyTarget, Pacing, StepCost, TimedRoom, work
from engine.plugins.kv_caches import radix
from engine.plugins.scheduling import fcfs
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.specs.speculator import Draft
from engine.testing.toy import ToyExecutor, toy_continuation
from engine.transfer import TransferLedger

PAGE, VOCAB, STREAMS = 16, 50, 50
DEVICES = {
    "laptop": (8e-3, 1e-3, 8e-4, 1e-4),
    "accelerator": (3e-3, 2e-5, 2e-5, 2e-5),
    "no floor": (0.0, 1e-4, 1e-4, 0.0),
}


def entry(start: int, count: int, drafts: Sequence[int] = ()) -> Entry:
    return Entry(slot=0, start=start, count=count, samples=True, first_page=0, new_pages=[], drafts=drafts)


class TimedToy(ToyExecutor):
    """A toy device that takes the time which its costs say."""

    def __init__(self, device: tuple[float, float, float, float], noise: float, **sizes: int) -> None:
        super().__init__(**sizes)
        *self.costs, self.slope = device
        self.noise, self.now = noise, 0.0
        self.done: list[tuple[StepBatch, float]] = []  # with the seconds each step took
        self._random = random.Random(3)

    def _step(self, batch: StepBatch) -> StepResult:
        amounts = work(batch.entries, self.slope)
        took = sum(c * a for c, a in zip(self.costs, amounts, strict=True)) * self._random.gauss(1, self.noise)
        self.now += took
        self.done.append((batch, took))
        return super()._step(batch)


def serve(device: TimedToy, target: float | None, overlap: bool, budget: int = 1024) -> Engine:
    (cache,) = radix.kv_caches()
    (policy,) = fcfs.scheduling_policies()
    pages = len(device.memory)
    handover = Handover(TransferLedger([], lambda: 0.0), engine_id="toy", page_size=PAGE)
    scheduler = Scheduler(
        cache.build(cache.options(), num_pages=pages, page_size=PAGE),
        policy.build(policy.options()),
        Limits(max_running=STREAMS + 2, max_waiting=100, token_budget=budget, prefill_chunk=budget),
        transfers=handover,
        pacing=LatencyTarget(target, 1e-4, lambda: device.now) if target else None,
    )
    handover.attach(scheduler)
    return Engine(
        scheduler,
        device,
        handover,
        Observation([]),
        drafter=None,
        overlap=overlap,
        max_context=8000,
        eos=frozenset(),
        vocab_size=VOCAB,
    )


def ask(engine: Engine, name: str, prompt: list[int], tokens: int) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    assert engine.add(Add(name, prompt, params)) is None


def under_load(
    device: TimedToy, target: float | None, overlap: bool, length: int = 4000
) -> list[tuple[StepBatch, float]]:
    """Fifty streams decode when a long prompt comes, and later another. The steps in which the second was computed."""
    engine = serve(device, target, overlap)
    rng = random.Random(1)
    prompts = {f"s{i}": [rng.randrange(VOCAB) for _ in range(20)] for i in range(STREAMS)}
    for name, prompt in prompts.items():
        ask(engine, name, prompt, 330 if target else 60)
    texts: dict[str, list[int]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for output in engine.step():
                texts.setdefault(output.request_id, []).extend(output.token_ids)

    steps(10)
    for name in ("first", "second"):
        prompts[name] = [rng.randrange(VOCAB) for _ in range(length)]
        ask(engine, name, prompts[name], 2)
        began = len(device.done)
        while name in engine.scheduler.requests:
            steps(1)
    end = len(device.done)
    for name in ("first", "second", "s7"):
        assert texts[name] == toy_continuation(prompts[name], len(texts[name]), VOCAB)
    return [(batch, took) for batch, took in device.done[began:end] if any(e.count > 1 for e in batch.entries)]


def toy(device: str, noise: float = 0.0) -> TimedToy:
    sizes = {"num_pages": 2500, "page_size": PAGE, "slots": STREAMS + 2, "vocab_size": VOCAB, "max_len": 8000}
    return TimedToy(DEVICES[device], noise, **sizes)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("device", "target"), [("laptop", 0.2), ("accelerator", 0.02), ("no floor", 0.05)])
def test_a_long_prompt_keeps_every_step_within_the_target(device: str, target: float, overlap: bool) -> None:
    steps = under_load(toy(device, noise=0.03), target, overlap)
    assert all(sum(e.count == 1 for e in batch.entries) >= STREAMS for batch, _ in steps), "a stream was left out"
    assert max(took for _, took in steps[1:]) <= 1.2 * target
    assert sum(took for _, took in steps[1:-1]) >= 0.75 * target * len(steps[1:-1]), "time was left unused"


def test_without_a_target_a_prompt_fills_the_budget_and_no_stream_is_left_out() -> None:
    steps = under_load(toy("laptop"), None, overlap=True)
    assert [batch.num_tokens for batch, _ in steps[:-1]] == [1024] * (len(steps) - 1)
    assert all(sum(e.count == 1 for e in batch.entries) >= STREAMS for batch, _ in steps)


def test_every_stream_is_served_before_any_draft() -> None:
    engine = serve(toy("laptop"), None, overlap=False, budget=10)
    for i in range(6):
        ask(engine, f"s{i}", [i] * 3, 100)
    while any(request.remaining > 1 for request in engine.scheduler.requests.values()):
        engine.step()
    launched = engine.scheduler.schedule({f"s{i}": Draft([1, 2, 3, 4]) for i in range(6)})
    assert launched is not None
    assert [len(e.drafts) for e in launched.batch.entries] == [0] * 5 + [4]
    assert launched.batch.num_tokens == 10


def test_a_target_that_decodes_alone_miss_still_lets_prompts_get_on() -> None:
    steps = under_load(toy("laptop"), 0.03, overlap=True, length=1000)
    assert {e.count for batch, _ in steps[:-1] for e in batch.entries if e.count > 1} == {LEAST}


def test_the_estimate_follows_a_device_that_becomes_slower() -> None:
    cost = StepCost()
    step = work([*[entry(100, 1)] * 8, entry(0, 200)], 0.0)
    for seconds in (0.1, 0.3):
        for _ in range(20):
            cost.learn(step, seconds)
        assert cost.of(step) == pytest.approx(seconds, rel=0.05)


def test_one_slow_step_is_taken_for_a_hiccup() -> None:
    cost = StepCost()
    step = work([*[entry(100, 1)] * 8, entry(0, 200)], 0.0)
    for _ in range(20):
        cost.learn(step, 0.1)
    cost.learn(step, 30.0)
    assert cost.of(step) < 0.17


def test_what_fits_takes_the_time_that_is_left() -> None:
    cost = StepCost()
    cost.costs = [0.01, 0.001, 0.0005]
    for slope in (0.0, 1e-4):
        for start in (0, 5000):
            room = TimedRoom(cost, slope, 0.2, 10_000)
            count = room.tokens(start)
            fit, more = (cost.of((0.0, *work([entry(start, n)], slope)[1:])) for n in (count, count + 3))
            assert fit <= 0.2005
            assert more > 0.2
            room.take(entry(start, count + 3))
            assert room.spent
    sizes = [TimedRoom(cost, 1e-4, 0.2, 10_000).tokens(start) for start in range(0, 50_000, 5000)]
    assert all(a > b for a, b in pairwise(sizes)), "the deeper in a prompt, the dearer its tokens"


def test_drafts_count_as_tokens_and_a_wait_between_steps_does_not() -> None:
    assert work([entry(5, 1), entry(7, 4, drafts=(1, 2, 3))], 0.0) == (1.0, 2.0, 3.0)
    clock = [0.0]
    paced = LatencyTarget(0.1, 0.0, lambda: clock[0])
    for began, ended in [(0.0, 1.0), (0.5, 2.0), (10.0, 11.0)]:  # the second was launched while the first ran
        clock[0] = ended
        paced.measured([entry(0, 1)], began)
        assert paced.cost.of((1.0, 1.0, 0.0)) == pytest.approx(1.0)


def test_steps_above_the_target_are_counted() -> None:
    clock = [0.0]
    paced = LatencyTarget(0.1, 0.0, lambda: clock[0])
    for entries, took in [((1, 5), 0.2), ((1, 5), 0.05), ((1, 1), 0.5), ((5, 5), 0.5)]:
        began, clock[0] = clock[0], clock[0] + took
        paced.measured([entry(0, count) for count in entries], began)
    stats = paced.stats()
    assert (stats["target"], stats["mixed_steps"], stats["late_steps"]) == (0.1, 2, 1)
    assert Pacing().stats() == {}
