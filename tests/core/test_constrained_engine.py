"""Constrained requests through scheduler and runner: whatever the composition, each text is the same and has its form.

The model's logits are a hash of token and position, so the expected text can be computed without an engine.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.compiling import Compiling
from engine.drafting import Drafter
from engine.engine import Engine
from engine.grammars import GrammarLimits, Grammars
from engine.handover import Handover
from engine.messages import Add, FinishReason, Output
from engine.observation import Observation
from engine.plugins.executors import uniproc
from engine.plugins.grammars import llguidance
from engine.plugins.kv_caches import radix
from engine.plugins.scheduling import fcfs
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.specs.attention import AttentionBackend, AttentionBatch, KVLayout
from engine.specs.grammar import GrammarBackend, TokenTable
from engine.specs.model import Forward, Model
from engine.specs.speculator import Draft, DraftContext, Speculator
from engine.structured import Structured
from engine.testing.grammar import END, SPECS, TABLE, allowed, cut
from engine.transfer import TransferLedger

VOCAB = len(TABLE.tokens)
PAGE = 4


def hashed(tokens: Tensor, positions: Tensor) -> Tensor:
    """Logits [N, VOCAB] that look random; the end token is unlikely, blanks and brackets are less so."""
    ids = torch.arange(VOCAB, dtype=torch.int64)
    mixed = (tokens.unsqueeze(1) * 7919 + positions.unsqueeze(1) * 104_729 + ids * 15_485_863) % 100_003
    return (mixed * 48_271 % 65_537).float() / 6_553.7


class Hashed(Model):
    """Passes token and position on to the head."""

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        return torch.stack([tokens, positions], 1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hashed(hidden[:, 0], hidden[:, 1])

    def weight_bytes(self) -> int:
        return 0


class NoAttention(AttentionBackend):
    def kv_layout(self) -> KVLayout:
        return KVLayout(parts=(), dtype="float32")

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Any) -> Tensor:
        raise AssertionError("the model has no attention")


def backend(tokens: TokenTable = TABLE) -> GrammarBackend:
    (offer,) = llguidance.grammars()
    return offer.build(offer.options(), tokens=tokens)


def expected(prompt: Sequence[int], spec: Structured | None, count: int) -> list[int]:
    """The greedy text, from masks alone."""
    matcher, tokens = backend().compile(spec) if spec else None, list(prompt)
    while len(tokens) < len(prompt) + count:
        logits = hashed(torch.tensor([tokens[-1]]), torch.tensor([len(tokens) - 1]))[0]
        ids = sorted(allowed(matcher)) if matcher else list(range(VOCAB))
        tokens.append(max(ids, key=lambda i: (float(logits[i]), -i)))
        if tokens[-1] == END:
            break
        assert matcher is None or matcher.accept(tokens[-1])
    return tokens[len(prompt) :]


class Oracle(Speculator):
    """Drafts the expected text, now and then with a wrong token in it."""

    def __init__(self, truth: dict[str, list[int]]) -> None:
        self._truth, self._random = truth, random.Random(3)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        done = len(context.tokens) - context.prompt_len
        tokens = self._truth[context.request_id][done : done + 4]
        if tokens and self._random.random() < 0.5:
            tokens[self._random.randrange(len(tokens))] = self._random.randrange(VOCAB)
        return Draft(tokens)


class Bench:
    """An engine and what its clients have received."""

    def __init__(self, engine: Engine, grammars: Grammars | None) -> None:
        self.engine, self.grammars = engine, grammars
        self.outputs: dict[str, list[Output]] = defaultdict(list)

    def add(self, name: str, prompt: Sequence[int], **params: Any) -> Output | None:
        chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, **params})
        return self.engine.add(Add(name, list(prompt), chosen))

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id].append(output)

    def until(self, condition: Callable[[], bool]) -> None:
        for _ in range(100_000):
            if condition():
                return
            self.step()
        raise AssertionError("the engine does not get there")

    def run(self) -> None:
        self.until(lambda: not self.engine.has_work)
        cache = self.engine.scheduler.cache
        cache.check()

    def tokens(self, name: str) -> list[int]:
        assert not any(output.error for output in self.outputs[name]), self.outputs[name]
        return [token for output in self.outputs[name] for token in output.token_ids]

    def end(self, name: str) -> Output:
        return self.outputs[name][-1]


@contextmanager
def bench(
    *,
    build: Callable[[TokenTable], GrammarBackend] | None = backend,
    pages: int = 400,
    budget: int = 64,
    overlap: bool = True,
    speculator: Speculator | None = None,
    seconds: float = 60.0,
) -> Iterator[Bench]:
    limits = GrammarLimits(max_size=2000, max_depth=8, compile_seconds=seconds)
    grammars = Grammars(lambda: TABLE, build, limits) if build else None
    (executor,) = uniproc.executors()
    (cache,) = radix.kv_caches()
    (policy,) = fcfs.scheduling_policies()
    drafter = Drafter(speculator, max_draft=4, vocab_size=VOCAB) if speculator else None
    handover = Handover(TransferLedger([], lambda: 0.0), engine_id="e", page_size=PAGE)
    scheduler = Scheduler(
        cache.build(cache.options(), num_pages=pages, page_size=PAGE),
        policy.build(policy.options()),
        Limits(max_running=8, max_waiting=100, token_budget=budget, prefill_chunk=budget),
        drafts=drafter,
        transfers=handover,
    )
    handover.attach(scheduler)

    def make_runner() -> Runner:
        return Runner(
            Hashed(),
            NoAttention(),
            [],
            page_size=PAGE,
            slots=8,
            max_len=300,
            device=torch.device("cpu"),
            grammars=grammars,
        )

    engine = Engine(
        scheduler,
        executor.build(executor.options(), make_runner=make_runner),
        handover,
        Observation([]),
        drafter=drafter,
        overlap=overlap,
        max_context=200,
        eos=frozenset({END}),
        vocab_size=VOCAB,
        compiling=Compiling(grammars),
    )
    try:
        yield Bench(engine, grammars)
    finally:
        engine.close()


REQUESTS: dict[str, tuple[list[int], Structured | None]] = {
    **{name: (cut(f"say {name}"), spec) for name, spec in SPECS.items()},
    "again": (cut("say json_schema"), SPECS["json_schema"]),
    "free": (cut("say"), None),
}
TRUTH = {name: expected(prompt, spec, 24) for name, (prompt, spec) in REQUESTS.items()}


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
@pytest.mark.parametrize("overlap", [True, False], ids=["overlapped", "in turn"])
@pytest.mark.parametrize(("pages", "budget"), [(400, 64), (24, 64), (400, 5)], ids=["roomy", "preempting", "chunked"])
def test_composition_does_not_change_constrained_texts(drafts: bool, overlap: bool, pages: int, budget: int) -> None:
    speculator = Oracle(TRUTH) if drafts else None
    with bench(pages=pages, budget=budget, overlap=overlap, speculator=speculator) as it:
        for name, (prompt, spec) in REQUESTS.items():
            assert it.add(name, prompt, structured=spec) is None
        it.run()
        assert {name: it.tokens(name) for name in REQUESTS} == TRUTH
        assert it.engine.scheduler.preemptions > 0 or pages > 100
        assert not drafts or it.engine.stats()["drafts"]["accepted"] > 20


@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafts"])
def test_sampled_texts_have_their_form_and_follow_their_seed(drafts: bool) -> None:
    texts = []
    for _ in range(2):
        with bench(speculator=Oracle(TRUTH) if drafts else None) as it:
            for name, (prompt, spec) in REQUESTS.items():
                it.add(name, prompt, structured=spec, temperature=1.0, seed=5, logprobs=2)
            it.run()
            texts.append({name: it.tokens(name) for name in REQUESTS})
    assert texts[0] == texts[1]
    for name, (_, spec) in REQUESTS.items():
        matcher = backend().compile(spec) if spec else None
        assert matcher is None or all(matcher.accept(token) for token in texts[0][name])


def test_logprobs_are_of_the_logits_before_the_mask() -> None:
    with bench() as it:
        it.add("a", cut("x"), structured=SPECS["choice"], logprobs=1, max_tokens=1)
        it.run()
        (entry,) = it.end("a").logprobs or ()
        raw = torch.log_softmax(hashed(torch.tensor([ord("x")]), torch.tensor([0]))[0], 0)
        assert entry.token_ids[1] == int(raw.argmax())
        assert entry.logprobs[0] == pytest.approx(float(raw[entry.token_ids[0]]), abs=1e-5)


@pytest.mark.parametrize("params", [{"min_tokens": 20}, {"ignore_eos": True}], ids=["min_tokens", "ignore_eos"])
def test_a_form_that_is_complete_ends_the_text_whatever_else_is_wanted(params: dict[str, Any]) -> None:
    with bench() as it:
        it.add("closed", cut("x"), structured=SPECS["choice"], **params)
        it.add("open", cut("x"), structured=Structured("regex", "[a-z]+"), **params)
        it.run()
        assert it.end("closed").finish_reason is FinishReason.STOP
        assert bytes(b for t in it.tokens("closed")[:-1] for b in TABLE.tokens[t]).decode() in SPECS["choice"].value
        assert len(it.tokens("open")) >= 20
        assert END not in it.tokens("open")[:19]


def test_bad_words_yield_to_the_form() -> None:
    with bench() as it:
        yes, no = cut("y")[0], cut("n")[0]
        pair = Structured("choice", ("y", "n"))
        it.add("one", cut("x"), structured=pair, bad_word_ids=((no,),))
        it.add("other", cut("x"), structured=pair, bad_word_ids=((yes,),))
        it.add("both", cut("x"), structured=pair, bad_word_ids=((no,), (yes,)))
        it.run()
        assert it.tokens("one") == [yes, END]
        assert it.tokens("other") == [no, END]
        assert it.tokens("both")[0] in (yes, no)


def test_stop_tokens_end_a_constrained_text_early() -> None:
    with bench() as it:
        it.add("a", cut("x"), structured=Structured("regex", "ab{50}c"), stop_token_ids=(ord("b"),))
        it.run()
        assert it.tokens("a") == cut("ab")
        assert it.end("a").stop_token == ord("b")


@pytest.mark.parametrize(
    ("structured", "words"),
    [
        (Structured("regex", "("), "the regex can't be used: invalid regex"),
        (Structured("regex", "a" * 2001), "has 2001 characters, but at most 2000"),
        (Structured("json_schema", '{"a":' * 9 + "1" + "}" * 9), "nested 9 deep, but at most 8"),
        (Structured("json_schema", "[" * 1500), "nested"),
        (Structured("json_schema", '{"type": "nothing"}'), "the json_schema can't be used"),
    ],
)
def test_a_bad_constraint_is_refused_before_anything_is_computed(structured: Structured, words: str) -> None:
    with bench() as it:
        output = it.add("bad", cut("x"), structured=structured)
        it.add("good", cut("say"))
        it.run()
        refusal = output or it.end("bad")
        assert refusal.invalid
        assert refusal.finish_reason is FinishReason.ERROR
        assert words in refusal.error
        assert not refusal.token_ids
        assert it.tokens("good") == TRUTH["free"]


def test_without_a_component_constraints_are_refused() -> None:
    with bench(build=None) as it:
        refusal = it.add("a", cut("x"), structured=SPECS["choice"])
        assert refusal is not None
        assert refusal.invalid
        assert "has none" in refusal.error
