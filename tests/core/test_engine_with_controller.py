"""The engine on a toy device whose clock is told: it drafts while that pays, and schedules ahead while it doesn't."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

from engine.batch import StepBatch, StepResult
from engine.control import answer
from engine.drafting import Drafter
from engine.engine import Engine
from engine.handover import Handover
from engine.messages import Add
from engine.observation import Observation
from engine.plugins.kv_caches import radix
from engine.plugins.scheduling import fcfs
from engine.sampling_params import SamplingParams, Speculation
from engine.scheduler import Limits, Scheduler
from engine.specs.speculator import Draft, DraftContext, Speculator
from engine.speculation.controller import Controller, State
from engine.testing.toy import ToyExecutor, toy_continuation
from engine.transfer import TransferLedger

VOCAB = 50
LENGTH = 260


class Oracle(Speculator):
    """Knows what comes, unless told to be wrong."""

    def __init__(self, right: bool) -> None:
        self.right = right
        self.asked: set[str] = set()

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        self.asked |= {context.request_id for context in contexts}
        off = 0 if self.right else 1
        return [Draft([(t + off) % VOCAB for t in toy_continuation(c.tokens, c.max_tokens, VOCAB)]) for c in contexts]


class TimedDevice(ToyExecutor):
    """A step takes 10 ms, and 2 more for each token beyond one a request."""

    now = 0.0

    def _step(self, batch: StepBatch) -> StepResult:
        self.now += 0.01 + 0.002 * sum(entry.count - 1 for entry in batch.entries)
        return super()._step(batch)


class Bench:
    """An engine with a drafter and a controller."""

    def __init__(self, speculator: Speculator | None, overlap: bool = True) -> None:
        (cache,), (policy,) = radix.kv_caches(), fcfs.scheduling_policies()
        self.device = TimedDevice(num_pages=800, page_size=4, slots=8, vocab_size=VOCAB)
        self.drafter = speculator and Drafter(
            speculator,
            max_draft=4,
            vocab_size=VOCAB,
            name="oracle",
            lengths=Controller(4, 0.01),
            clock=lambda: self.device.now,
        )
        handover = Handover(TransferLedger([], lambda: 0.0), engine_id="toy", page_size=4)
        observation = Observation([])
        self.scheduler = Scheduler(
            cache.build(cache.options(), num_pages=800, page_size=4),
            policy.build(policy.options()),
            Limits(max_running=8, max_waiting=8, token_budget=64, prefill_chunk=64),
            drafts=self.drafter,
            transfers=handover,
            emit=observation.emit,
        )
        handover.attach(self.scheduler)
        self.engine = Engine(
            self.scheduler,
            self.device,
            handover,
            observation,
            drafter=self.drafter,
            overlap=overlap,
            max_context=1000,
            eos=frozenset(),
            vocab_size=VOCAB,
        )
        self.tokens: dict[str, list[int]] = {}

    def add(self, name: str, speculation: Speculation | None = None) -> str | None:
        params = SamplingParams(temperature=0.0, max_tokens=LENGTH, speculation=speculation)
        refusal = self.engine.add(Add(name, [1, 2, 3], params, cache_salt=name))
        self.tokens[name] = []
        return refusal.error if refusal else None

    def run(self) -> float:
        """Seconds until everything is done; all texts are what they should be."""
        began = self.device.now
        while self.engine.has_work:
            for output in self.engine.step():
                self.tokens[output.request_id] += output.token_ids
        assert all(text == toy_continuation([1, 2, 3], LENGTH, VOCAB) for text in self.tokens.values())
        return self.device.now - began


@cache
def plain(requests: int) -> float:
    bench = Bench(None)
    for i in range(requests):
        bench.add(f"r{i}")
    return bench.run()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(("requests", "least"), [(1, 2.0), (3, 1.3)])  # at best 2.8 and 1.5
def test_right_drafts_make_it_faster(requests: int, least: float, overlap: bool) -> None:
    bench = Bench(Oracle(right=True), overlap)
    for i in range(requests):
        bench.add(f"r{i}")
    assert bench.run() < plain(requests) / least
    stats = bench.engine.stats()["drafts"]
    assert stats["controller"]["state"] == State.ON
    assert stats["accepted"] == stats["drafted"] == sum(stats["accepted_at"])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("requests", [1, 3])
def test_wrong_drafts_cost_next_to_nothing(requests: int, overlap: bool) -> None:
    bench = Bench(Oracle(right=False), overlap)
    for i in range(requests):
        bench.add(f"r{i}")
    assert bench.run() <= plain(requests) / 0.97
    stats = answer(bench.engine, "speculation", {})
    assert stats["turns"][0]["why"] == "the account pays for a probe"
    assert stats["controller"]["alarm"]
    assert stats["accepted"] == 0 < stats["drafted"]


def test_a_speculator_that_raises_rings_the_alarm_and_changes_nothing(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Oracle):
        def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
            raise RuntimeError("out of ideas")

    bench = Bench(Broken(right=True))
    bench.add("r")
    assert bench.run() <= plain(1) / 0.97
    stats = bench.engine.stats()["drafts"]
    assert stats["controller"]["alarm"]
    assert stats["faults"] > 2
    assert "out of ideas" in caplog.text
    assert "no usable draft" in caplog.text


def test_it_schedules_ahead_while_it_does_not_draft() -> None:
    bench = Bench(Oracle(right=False))
    bench.add("r")
    ahead = 0
    while bench.engine.has_work:
        bench.engine.step()
        ahead += bench.engine._ahead is not None
    assert ahead > 0.9 * LENGTH


def test_a_request_may_do_without() -> None:
    oracle = Oracle(right=True)
    bench = Bench(oracle)
    bench.add("with")
    bench.add("without", Speculation(method="none"))
    bench.add("zero", Speculation(max_tokens=0))
    bench.add("named", Speculation(method="oracle", max_tokens=1))
    bench.run()
    assert oracle.asked == {"with", "named"}
    assert bench.engine.stats()["drafts"]["accepted_at"][3] > 0


def test_a_request_may_bound_its_drafts() -> None:
    bench = Bench(Oracle(right=True))
    bench.add("r", Speculation(max_tokens=2))
    bench.run()
    counters = bench.engine.stats()["drafts"]
    assert counters["accepted_at"][2:] == [0, 0]
    assert counters["accepted_at"][1] > 0


def test_another_speculator_than_the_engine_has_is_refused() -> None:
    asked = Speculation(method="eagle")
    assert Bench(Oracle(right=True)).add("r", asked) == (
        "speculation.method is 'eagle', but this engine speculates with 'oracle': name that or 'none', or leave it out"
    )
    assert Bench(None).add("r", asked) == (
        "speculation.method is 'eagle', but this engine speculates with nothing: say 'none', or leave it out"
    )
    assert Bench(None).add("r", Speculation(method="none")) is None
