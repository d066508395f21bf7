"""An engine around the kit's small target, requests of all kinds, and what comes of them without a speculator."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch

from engine.compiling import Compiling
from engine.drafting import Drafter
from engine.engine import Engine
from engine.grammars import GrammarLimits, Grammars
from engine.handover import Handover
from engine.kv_memory import cut_pool
from engine.kv_moves import KVMoves
from engine.messages import Add, Output
from engine.observation import Observation
from engine.plugins.attention.reference.backend import ReferenceAttention
from engine.plugins.executors import uniproc
from engine.plugins.grammars import llguidance
from engine.plugins.kv_caches import paged, radix
from engine.plugins.scheduling import fcfs
from engine.request import Status
from engine.resident.parts import DraftKV, ResidentParts, scratch_pages
from engine.runner import Runner, StepForward
from engine.sampling_params import SamplingParams
from engine.scheduler import Limits, Scheduler
from engine.specs.speculator import AnySpeculator, ResidentSpeculator, TargetTaps
from engine.testing.grammar import END, TABLE
from engine.testing.twin import LAYERS, SHAPE, VOCAB, Small
from engine.transfer import TransferLedger

PAGE, PAGES, SLOTS, MOST = 4, 120, 6, 4
CACHES = {"paged": paged, "radix": radix}
Requests = dict[str, tuple[list[int], dict[str, Any]]]


class Bench:
    """An engine and what its clients have received."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self.engine, self.runner = engine, runner
        self.outputs: dict[str, list[Output]] = defaultdict(list)

    def serve(self, requests: Requests, preempt: bool = False, alone: bool = False) -> None:
        """`alone`: no request finds what another has computed."""
        for name, (prompt, params) in requests.items():
            chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 20, **params})
            assert self.engine.add(Add(name, prompt, chosen, cache_salt=name if alone else "")) is None
        waiting = set(requests) if preempt else set()
        for _ in range(200_000):
            if not self.engine.has_work:
                break
            for output in self.engine.step():
                self.outputs[output.request_id].append(output)
            for name in sorted(waiting):
                request = self.engine.scheduler.requests.get(name)
                if request and request.status is Status.RUNNING and request.num_output >= 4 and not request.in_flight:
                    waiting.discard(name)
                    self.engine.scheduler.preempt(request)
        assert not self.engine.has_work
        cache = self.engine.scheduler.cache
        cache.check()
        assert cache.stats().held == 0

    def tokens(self, name: str) -> list[int]:
        assert not any(output.error for output in self.outputs[name]), self.outputs[name]
        return [token for output in self.outputs[name] for token in output.token_ids]

    def logprobs(self, name: str) -> list[float]:
        return [one.logprobs[0] for output in self.outputs[name] for one in output.logprobs or ()]


def parts(resident: ResidentSpeculator) -> ResidentParts:
    plan, kv = resident.plan(None), None  # type: ignore[arg-type]
    if plan.kv:
        backend = ReferenceAttention(plan.kv, PAGE)
        scratch = scratch_pages(plan, PAGE)
        pool = cut_pool(backend.kv_layout(), LAYERS, PAGES + (SLOTS + 1) * scratch + 1, torch.device("cpu"))
        kv = DraftKV(forward=StepForward(backend, pool, TargetTaps()), backend=backend, scratch=scratch)
    return ResidentParts(
        speculator=resident, plan=plan, kv=kv, pages=PAGES, page_size=PAGE, vocab_size=VOCAB, chain=MOST
    )


def runner(
    kind: Callable[..., Runner], speculator: AnySpeculator | None, trees: bool, grammars: Grammars | None
) -> Runner:
    backend = ReferenceAttention(SHAPE, PAGE)
    pool = cut_pool(backend.kv_layout(), LAYERS, PAGES + 1, torch.device("cpu"))  # the last one is for padding
    return kind(
        Small(),
        backend,
        pool,
        page_size=PAGE,
        slots=SLOTS,
        max_len=300,
        device=torch.device("cpu"),
        resident=parts(speculator) if isinstance(speculator, ResidentSpeculator) else None,
        moves=KVMoves(backend.kv_layout(), pool, PAGE) if trees else None,
        grammars=grammars,
    )


@contextmanager
def serving(
    speculator: AnySpeculator | None = None,
    *,
    cache: str = "radix",
    budget: int = 64,
    trees: bool = True,
    grammar: bool = False,
    most: int = MOST,
    kind: Callable[..., Runner] = Runner,
) -> Iterator[Bench]:
    limits = GrammarLimits(max_size=2000, max_depth=8, compile_seconds=60.0)
    (grammar_offer,) = llguidance.grammars()
    build: Callable[..., Any] = lambda tokens: grammar_offer.build(grammar_offer.options(), tokens=tokens)  # noqa: E731
    grammars = Grammars(lambda: TABLE, build, limits) if grammar else None
    (executor,), (policy,), (offer,) = uniproc.executors(), fcfs.scheduling_policies(), CACHES[cache].kv_caches()
    drafter = Drafter(speculator, max_draft=most, vocab_size=VOCAB) if speculator else None
    handover = Handover(TransferLedger([], lambda: 0.0), engine_id="e", page_size=PAGE)
    scheduler = Scheduler(
        offer.build(offer.options(), num_pages=PAGES, page_size=PAGE),
        policy.build(policy.options()),
        Limits(max_running=SLOTS, max_waiting=100, token_budget=budget, prefill_chunk=budget),
        drafts=drafter,
        transfers=handover,
    )
    handover.attach(scheduler)
    made: list[Runner] = []

    def make_runner() -> Runner:
        made.append(runner(kind, speculator, trees, grammars))
        return made[0]

    engine = Engine(
        scheduler,
        executor.build(executor.options(), make_runner=make_runner),
        handover,
        Observation([]),
        drafter=drafter,
        overlap=True,
        max_context=200,
        eos=frozenset({END} if grammar else ()),
        vocab_size=VOCAB,
        compiling=Compiling(grammars),
    )
    try:
        yield Bench(engine, made[0])
    finally:
        engine.close()


def drawn(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


REQUESTS: Requests = {
    "greedy": (drawn(1, 5), {}),
    "long": (drawn(2, 37), {"max_tokens": 30}),
    "one": (drawn(3, 1), {}),
    "drawn": (drawn(4, 11), {"temperature": 1.0, "seed": 7}),
    "nucleus": (drawn(5, 9), {"temperature": 0.8, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "seed": 8}),
    "logprobs": (drawn(6, 6), {"logprobs": 2}),
    "penalized": (drawn(7, 8), {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
    "biased": (drawn(8, 8), {"logit_bias": {3: 2.0, 5: -100.0}}),
    "told to stop": (drawn(9, 8), {"stop_token_ids": list(range(0, VOCAB, 9)), "min_tokens": 6}),
    "bad words": (drawn(10, 8), {"bad_word_ids": [(i, i + 1) for i in range(VOCAB - 1)] + [(17,)]}),
    "prompt again": (drawn(2, 37), {"prompt_logprobs": 1, "max_tokens": 8}),
    "same beginning": ([*drawn(2, 37)[:20], *drawn(11, 7)], {}),
}
"""Prompts and parameters of all kinds; two share a beginning."""


@pytest.fixture(scope="session")
def bench() -> Callable[..., AbstractContextManager[Bench]]:
    """Makes an engine; see `serving`."""
    return serving


@pytest.fixture(scope="session")
def prompt() -> Callable[[int, int], list[int]]:
    """Draws a prompt, given a seed and a length."""
    return drawn


@pytest.fixture(scope="session")
def asked() -> Requests:
    """Prompts and parameters of all kinds."""
    return REQUESTS


@pytest.fixture(scope="session")
def plain() -> Bench:
    """What comes without a speculator."""
    with serving() as it:
        it.serve(REQUESTS)
    return it
