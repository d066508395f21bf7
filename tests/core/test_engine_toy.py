"""Scheduler and step loops on the toy device: whatever the composition, the text is the toy model's own.

The toy reads its history back through pages, so these tests see every stale page, wrong slot or lost token.
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

import pytest

from engine.drafting import Drafter
from engine.engine import Engine
from engine.handover import Handover
from engine.messages import Add, FinishReason, Output
from engine.observation import Observation
from engine.plugins.kv_caches import paged, radix
from engine.plugins.scheduling import fcfs, prefix_aware, priority, weighted_fair
from engine.plugins.speculators import ngram
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.specs.kv_cache import KVCache
from engine.specs.speculator import Draft, DraftContext, Speculator
from engine.testing.toy import ToyExecutor, toy_continuation
from engine.transfer import TransferLedger

PAGE = 4
VOCAB = 7  # small, so that n-grams repeat
CACHES = {"paged": paged, "radix": radix}
POLICIES = {"fcfs": fcfs, "priority": priority, "prefix_aware": prefix_aware, "weighted_fair": weighted_fair}


class Guesser(Speculator):
    """Proposes a mixture of right, wrong, too long and impossible drafts."""

    def __init__(self) -> None:
        self.open: set[str] = set()
        self._random = random.Random(5)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        self.open.add(context.request_id)
        truth = toy_continuation(context.tokens, 5, VOCAB)
        kind = self._random.randrange(6)
        if kind == 0:
            return Draft()
        if kind == 1:
            return Draft([(t + 1) % VOCAB for t in truth])
        if kind == 2:
            return Draft([*truth[:2], VOCAB + 3])
        if kind == 3:
            return Draft([*truth[:2], (truth[2] + 1) % VOCAB, 0])
        if kind == 4:
            return Draft([(truth[0] + 1) % VOCAB, truth[0], truth[1]], parents=[None, None, 1])
        return Draft(truth)

    def forget(self, request_id: str) -> None:
        self.open.discard(request_id)


class Bench:
    """An engine over the toy device, and what its clients have received."""

    def __init__(
        self,
        cache: str = "radix",
        policy: str = "fcfs",
        *,
        pages: int = 64,
        running: int = 8,
        waiting: int = 1000,
        budget: int = 32,
        chunk: int | None = None,
        overlap: bool = True,
        speculator: Speculator | None = None,
    ) -> None:
        (cache_offer,) = CACHES[cache].kv_caches()
        (policy_offer,) = POLICIES[policy].scheduling_policies()
        self.cache: KVCache = cache_offer.build(cache_offer.options(), num_pages=pages, page_size=PAGE)
        self.device = ToyExecutor(num_pages=pages, page_size=PAGE, slots=running, vocab_size=VOCAB)
        drafter = Drafter(speculator, max_draft=4, vocab_size=VOCAB) if speculator else None
        handover = Handover(TransferLedger([], lambda: 0.0), engine_id="toy", page_size=PAGE)
        observation = Observation([])
        self.scheduler = Scheduler(
            self.cache,
            policy_offer.build(policy_offer.options()),
            Limits(max_running=running, max_waiting=waiting, token_budget=budget, prefill_chunk=chunk or budget),
            drafts=drafter,
            transfers=handover,
            emit=observation.emit,
        )
        handover.attach(self.scheduler)
        self.engine = Engine(
            self.scheduler,
            self.device,
            handover,
            observation,
            drafter=drafter,
            overlap=overlap,
            max_context=pages * PAGE,
            eos=frozenset(),
            vocab_size=VOCAB,
        )
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.ends: dict[str, Output] = {}

    def add(
        self, request_id: str, prompt: list[int], *, priority: int = 0, salt: str = "", **params: Any
    ) -> Output | None:
        chosen = SamplingParams(temperature=0.0, **params)
        return self.engine.add(Add(request_id, prompt, chosen, priority, salt))

    def step(self) -> list[Output]:
        outputs = self.engine.step()
        for output in outputs:
            assert output.request_id not in self.ends, "news after the end"
            self.tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                assert output.timing is not None or output.error
                self.ends[output.request_id] = output
        return outputs

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still working after {limit} steps")

    def assert_empty(self) -> None:
        """Every page is free or cached, and nothing is remembered."""
        self.cache.check()
        assert not self.engine.observation.times._lives
        stats = self.cache.stats()
        assert (stats.held, stats.free + stats.cached) == (0, stats.pages)
        assert not self.scheduler.requests
        assert not self.scheduler.running
        assert not self.scheduler.waiting
        assert len(self.scheduler._free_slots) == self.scheduler.limits.max_running


def prompts(count: int, seed: int, shared: int = 0, longest: int = 40) -> list[list[int]]:
    rng = random.Random(seed)
    prefix = [rng.randrange(VOCAB) for _ in range(shared)]
    return [prefix + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("speculate", ["off", "ngram", "guesser"])
@pytest.mark.parametrize("chunk", [None, 5])
@pytest.mark.parametrize("pages", [200, 30])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("cache", CACHES)
def test_composition_does_not_change_the_text(
    cache: str, overlap: bool, pages: int, chunk: int | None, speculate: str
) -> None:
    speculator: Speculator | None = {"off": None, "guesser": Guesser()}.get(speculate)
    if speculate == "ngram":
        (offer,) = ngram.speculators()
        speculator = offer.build(offer.options(), profile=None, max_running=8)
    bench = Bench(cache, pages=pages, chunk=chunk, overlap=overlap, speculator=speculator)
    asked = prompts(12, seed=pages, shared=17)
    for round_number in range(2):  # the second time over a warm cache
        for i, prompt in enumerate(asked):
            assert bench.add(f"{round_number}-{i}", prompt, max_tokens=20) is None
        bench.run()
    for round_number in range(2):
        for i, prompt in enumerate(asked):
            name = f"{round_number}-{i}"
            assert bench.tokens[name] == toy_continuation(prompt, 20, VOCAB), name
            assert bench.ends[name].finish_reason is FinishReason.LENGTH
    assert bench.ends["1-0"].cached_tokens >= PAGE
    if pages == 30:
        assert bench.scheduler.preemptions > 0, "the small pool should have forced preemptions"
    if isinstance(speculator, Guesser):
        assert not speculator.open, "a finished request is still remembered"
        assert bench.engine.drafter is not None
        assert 0 < bench.engine.drafter.counters.accepted < bench.engine.drafter.counters.drafted
        assert bench.engine.drafter.counters.faults > 0
    bench.assert_empty()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("overlap", [True, False])
def test_random_traffic_with_aborts_leaves_every_page_free_or_cached(cache: str, policy: str, overlap: bool) -> None:
    rng = random.Random(f"{cache}{policy}{overlap}")
    bench = Bench(cache, policy, pages=40, running=6, budget=24, chunk=7, waiting=20, overlap=overlap)
    asked: dict[str, tuple[list[int], int]] = {}
    aborted: set[str] = set()
    refused = 0
    for n in range(400):
        if rng.random() < 0.6:
            prompt, length = prompts(1, n, shared=rng.choice([0, 9]))[0], rng.randrange(1, 25)
            name = f"r{n}"
            refusal = bench.add(name, prompt, priority=rng.randrange(3), salt=rng.choice(["", "a"]), max_tokens=length)
            refused += refusal is not None
            if refusal is None:
                asked[name] = (prompt, length)
        if rng.random() < 0.1 and bench.scheduler.requests:
            name = rng.choice(list(bench.scheduler.requests))
            bench.engine.abort([name])
            aborted.add(name)
        bench.step()
        bench.cache.check()
    bench.run()
    assert refused > 0
    assert aborted
    for name, (prompt, length) in asked.items():
        expected = toy_continuation(prompt, length, VOCAB)
        if name in aborted:
            assert bench.tokens[name] == expected[: len(bench.tokens[name])]
        else:
            assert bench.tokens[name] == expected, name
    bench.assert_empty()


def test_a_full_queue_refuses_and_says_so() -> None:
    bench = Bench(running=2, waiting=3)
    answers = [bench.add(f"r{i}", [1, 2, 3], max_tokens=5) for i in range(7)]
    assert [a is None for a in answers] == [True] * 5 + [False] * 2
    refusal = answers[-1]
    assert refusal is not None
    assert refusal.refused
    assert "queue is full" in refusal.error
    bench.run()
    assert len(bench.ends) == 5
    bench.assert_empty()


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([1] * 300, {}, "maximum context length is 256"),
        ([1, VOCAB], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"max_tokens": 0}, "max_tokens"),
        ([1], {"allowed_token_ids": (1, VOCAB)}, "allowed_token_ids has ids outside"),
    ],
)
def test_impossible_requests_are_refused_with_a_reason(prompt: list[int], params: dict[str, Any], words: str) -> None:
    bench = Bench()
    refusal = bench.add("bad", prompt, **params)
    assert refusal is not None
    assert words in refusal.error
    assert refusal.invalid
    assert not refusal.refused
    bench.assert_empty()


@pytest.mark.parametrize(
    ("transfer", "words"),
    [
        ({"do_remote_decode": True}, "role producer"),
        ({"do_remote_prefill": True, "handle": {}}, "role consumer"),
        ({"do_remote_prefill": "yes"}, "must be true or false, not 'yes'"),
        ({"do_remote_decode": 5}, "must be true or false, not 5"),
    ],
)
def test_transfers_without_a_connector_are_refused(transfer: dict[str, Any], words: str) -> None:
    bench = Bench()
    refusal = bench.engine.add(Add("r", [1, 2], SamplingParams(max_tokens=1), kv_transfer=transfer))
    assert refusal is not None
    assert refusal.invalid
    assert words in refusal.error
    bench.assert_empty()


def test_an_abort_frees_pages_within_two_steps() -> None:
    bench = Bench(pages=16)
    bench.add("long", [1] * 30, max_tokens=30)
    for _ in range(4):
        bench.step()
    assert bench.cache.stats().held > 0
    bench.engine.abort(["long"])
    bench.step()
    bench.step()
    bench.assert_empty()


def test_decodes_go_on_while_a_long_prompt_is_chunked() -> None:
    bench = Bench(pages=200, budget=16, chunk=8, running=4, overlap=False)
    bench.add("stream", [1, 2, 3], max_tokens=60)
    bench.step()
    bench.add("prompt", [2] * 200, max_tokens=2)
    for _ in range(20):
        before = len(bench.tokens["stream"])
        bench.step()
        assert len(bench.tokens["stream"]) == before + 1
    bench.run()
    assert bench.tokens["prompt"] == toy_continuation([2] * 200, 2, VOCAB)


def test_a_step_never_exceeds_the_budget_but_for_decodes() -> None:
    bench = Bench(pages=300, budget=10, running=8)
    for i in range(8):
        bench.add(f"r{i}", [i % VOCAB] * 50, max_tokens=3)
    while bench.engine.has_work:
        launched = bench.scheduler.schedule()
        if launched is None:
            break
        assert launched.batch.num_tokens <= 10
        bench.scheduler.commit(launched, bench.device.launch(launched.batch).result())
    bench.assert_empty()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_failing_step_ends_its_requests_and_no_others(overlap: bool) -> None:
    bench = Bench(running=2, overlap=overlap)
    for i in range(4):
        bench.add(f"r{i}", [i, 1, 2], max_tokens=6)
    bench.device.fail_next = True
    bench.run()
    failed = [name for name, end in bench.ends.items() if end.finish_reason is FinishReason.ERROR]
    assert failed == ["r0", "r1"]
    assert "told to fail" in bench.ends["r0"].error
    assert bench.tokens["r3"] == toy_continuation([3, 1, 2], 6, VOCAB)
    bench.assert_empty()


def test_priorities_go_first_and_preempt() -> None:
    bench = Bench(policy="priority", running=1, overlap=False)
    bench.add("first", [1], max_tokens=4, priority=5)
    bench.add("low", [2], max_tokens=4, priority=9)
    bench.add("high", [3], max_tokens=4, priority=1)
    order: list[str] = []
    while bench.engine.has_work:
        order += [o.request_id for o in bench.step() if o.finish_reason is not None]
    assert order == ["high", "first", "low"]


def test_the_policy_hears_of_each_token_that_was_served() -> None:
    """The prompt once, however often a request is preempted, and all of the output."""
    bench = Bench(pages=12, running=4, budget=16)
    served: Counter[str] = Counter()
    bench.scheduler.policy.served = lambda request, tokens: served.update({request.id: tokens})  # type: ignore[method-assign]
    queue = prompts(6, seed=3, longest=12)
    for i, prompt in enumerate(queue):
        bench.add(f"r{i}", prompt, max_tokens=8)
    bench.run()
    assert bench.scheduler.preemptions
    assert served == {f"r{i}": len(prompt) + 8 for i, prompt in enumerate(queue)}


def test_stop_tokens_min_tokens_and_ignore_eos() -> None:
    prompt = [1, 2, 3]
    text = toy_continuation(prompt, 30, VOCAB)
    stop = text[5]
    first = text.index(stop)
    bench = Bench()
    bench.add("stops", prompt, max_tokens=30, stop_token_ids=(stop,))
    bench.run()
    assert bench.tokens["stops"] == text[: first + 1]
    assert bench.ends["stops"].finish_reason is FinishReason.STOP
    assert bench.ends["stops"].stop_token == stop
    bench.assert_empty()


def test_salts_keep_prefixes_apart() -> None:
    bench = Bench()
    prompt = [1] * 20
    for name, salt in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "")):
        bench.add(name, prompt, salt=salt, max_tokens=2)
        bench.run()
    cached = {name: end.cached_tokens for name, end in bench.ends.items()}
    assert cached == {"a": 0, "b": 16, "c": 0, "d": 0}


def test_the_same_id_twice_is_refused_while_it_runs() -> None:
    bench = Bench()
    assert bench.add("same", [1], max_tokens=3) is None
    second = bench.add("same", [2], max_tokens=3)
    assert second is not None
    assert "'same'" in second.error
    bench.run()
    assert bench.add("same", [2], max_tokens=3) is None
