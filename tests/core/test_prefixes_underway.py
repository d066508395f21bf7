"""Prompts that come at once and begin alike: one computes what they share, the others wait for it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.engine import Engine
from engine.handover import Handover
from engine.messages import Add
from engine.observation import Observation
from engine.plugins.kv_caches import paged, radix
from engine.plugins.scheduling import fcfs
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.testing.toy import ToyExecutor, toy_continuation
from engine.transfer import TransferLedger
from engine.underway import LEAST

PAGE, VOCAB, PAGES = 16, 11, 400
PREFIX = [random.Random(1).randrange(VOCAB) for _ in range(2 * LEAST)]


class Bench:
    """An engine over the toy device that counts the prompt tokens it computes."""

    def __init__(self, kind: Any = radix, budget: int = 2000, **options: Any) -> None:
        (cache,) = kind.kv_caches()
        (policy,) = fcfs.scheduling_policies()
        handover = Handover(TransferLedger([], lambda: 0.0), engine_id="toy", page_size=PAGE)
        self.scheduler = Scheduler(
            cache.build(cache.options(**options), num_pages=PAGES, page_size=PAGE),
            policy.build(policy.options()),
            Limits(max_running=8, max_waiting=100, token_budget=budget, prefill_chunk=budget),
            transfers=handover,
        )
        handover.attach(self.scheduler)
        self.engine = Engine(
            self.scheduler,
            ToyExecutor(num_pages=PAGES, page_size=PAGE, slots=8, vocab_size=VOCAB),
            handover,
            Observation([]),
            drafter=None,
            overlap=True,
            max_context=PAGES * PAGE,
            eos=frozenset(),
            vocab_size=VOCAB,
        )
        self.tokens: dict[str, list[int]] = {}
        self.computed = self.steps = 0

    def add(self, name: str, prompt: list[int], **more: Any) -> None:
        params = SamplingParams(temperature=0.0, max_tokens=3, **more.pop("params", {}))
        assert self.engine.add(Add(name, prompt, params, **more)) is None

    def step(self) -> None:
        for output in self.engine.step():
            self.tokens.setdefault(output.request_id, []).extend(output.token_ids)
        self.steps += 1
        if self.engine._ahead is not None:
            self.computed += sum(e.count for e in self.engine._ahead[0].batch.entries if e.count > 1)

    def run(self) -> None:
        while self.engine.has_work:
            self.step()
            assert self.steps < 200, "somebody waits for ever"


def prompts(count: int, own: int = 20) -> dict[str, list[int]]:
    draw = random.Random(2)
    return {str(i): [*PREFIX, i % VOCAB, *(draw.randrange(VOCAB) for _ in range(own))] for i in range(count)}


@pytest.mark.parametrize("kind", [paged, radix], ids=["paged", "radix"])
@pytest.mark.parametrize("budget", [2000, 300], ids=["whole", "in chunks"])
def test_what_is_shared_is_computed_once(kind: Any, budget: int) -> None:
    bench, asked = Bench(kind, budget), prompts(6)
    for name, prompt in asked.items():
        bench.add(name, prompt)
    bench.run()
    assert bench.tokens == {name: toy_continuation(prompt, 3, VOCAB) for name, prompt in asked.items()}
    spared = LEAST + PAGE if budget < len(PREFIX) else PAGE  # once so little is left, a request waits no longer
    assert bench.computed <= len(PREFIX) + 6 * (21 + spared)


def test_nobody_waits_where_nothing_is_found_again() -> None:
    bench = Bench(paged, prefix_caching=False)
    for name, prompt in prompts(2).items():
        bench.add(name, prompt)
    bench.step()
    assert len(bench.scheduler.running) == 2


def test_other_salts_and_other_beginnings_do_not_wait() -> None:
    bench = Bench()
    first, second = prompts(2).values()
    bench.add("first", first)
    bench.add("salted", second, cache_salt="else")
    bench.add("looked through", second, params={"prompt_logprobs": 0})
    bench.add("other", second[::-1])
    bench.add("waits", second)
    bench.step()
    assert set(bench.scheduler.waiting) == {"waits"}
    bench.run()
    assert len(bench.tokens) == 5


def test_the_one_that_computes_may_go_away() -> None:
    bench, asked = Bench(budget=200), prompts(3)
    for name, prompt in asked.items():
        bench.add(name, prompt)
    bench.step()
    assert set(bench.scheduler.running) == {"0"}
    bench.engine.abort(["0"])
    bench.run()
    assert bench.tokens == {name: toy_continuation(asked[name], 3, VOCAB) for name in "12"}
