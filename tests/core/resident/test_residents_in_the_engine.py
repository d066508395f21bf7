"""Residents and trees through scheduler, runner and real attention: whatever is drafted, the text is the target's own.

The target is a small random decoder whose next token depends on all tokens before through paged KV. One resident is the
same decoder with KV of its own, so that its drafts are all accepted just if its pages hold what they should.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Entry
from engine.compiling import Compiling
from engine.drafting import Drafter
from engine.engine import Engine
from engine.grammars import GrammarLimits, Grammars
from engine.handover import Handover
from engine.kv_memory import cut_pool
from engine.kv_moves import KVMoves
from engine.messages import Add, Output
from engine.observation import Observation
from engine.plugin import KVKind
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
from engine.specs.attention import AttentionShape
from engine.specs.model import Forward, Model
from engine.specs.speculator import (
    AnySpeculator,
    Checkpoint,
    Draft,
    DraftBatch,
    DraftContext,
    Drafted,
    ExtendBatch,
    ResidentPlan,
    ResidentSpeculator,
    Speculator,
    Target,
    TargetTaps,
)
from engine.testing.grammar import END, SPECS, TABLE
from engine.transfer import TransferLedger

VOCAB, WIDTH, HEADS, LAYERS = len(TABLE.tokens), 16, 2, 2
PAGE, PAGES, SLOTS, MOST = 4, 120, 6, 4
CACHES = {"paged": paged, "radix": radix}
SHAPE = AttentionShape(
    kind=KVKind.GQA,
    heads=HEADS,
    kv_heads=1,
    head_dim=8,
    v_head_dim=8,
    scale=0.5,
    windows=(None, None),
    softcap=None,
    dtype="float32",
)


class Small(Model):
    """A decoder of a few matrices."""

    def __init__(self, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._table = torch.randn(VOCAB, WIDTH, generator=draw)
        self._places = torch.randn(400, WIDTH, generator=draw) * 0.7
        self._head = torch.randn(VOCAB, WIDTH, generator=draw)
        self._qkv = torch.randn(LAYERS, (HEADS + 2) * 8, WIDTH, generator=draw) * 0.5
        self._out = torch.randn(LAYERS, WIDTH, HEADS * 8, generator=draw) * 0.7

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        x = self._table[tokens] + self._places[positions]
        for layer in range(LAYERS):
            step.tap(layer, x)
            q, k, v = (x @ self._qkv[layer].T).view(len(x), HEADS + 2, 8).split((HEADS, 1, 1), 1)
            x = x + torch.tanh(step.attend(layer, q, k, v).flatten(1) @ self._out[layer].T)
        step.tap(LAYERS, x)
        return x / x.norm(dim=-1, keepdim=True)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head.T * 2.0

    def embed(self, tokens: Tensor) -> Tensor:
        return self._table[tokens]

    def weight_bytes(self) -> int:
        return 0


class Mirror(ResidentSpeculator):
    """The target's twin. Notes how many of its drafts were greedy."""

    def __init__(self, tree: bool = False, probs: bool = False) -> None:
        self.model, self.tree, self.probs = Small(), tree, probs
        self.extended = 0

    def plan(self, checkpoint: Checkpoint | None = None) -> ResidentPlan:
        return ResidentPlan(kv=SHAPE, places=2 * MOST)

    def load(self, target: Target) -> None:
        """Made already."""

    def extend(self, batch: ExtendBatch) -> None:
        self.extended += len(batch.tokens)
        self.model.forward(batch.tokens, batch.positions, batch.step)

    def draft(self, batch: DraftBatch) -> Drafted:
        return self._tree(batch) if self.tree else self._chain(batch)

    def _chain(self, batch: DraftBatch) -> Drafted:
        tokens, found, probs = batch.tokens, [], []
        for place in range(max(batch.rooms)):
            positions = batch.positions + place
            hidden = self.model.forward(tokens, positions, batch.step(place, positions[:, None]))
            logits = self.model.logits(hidden)
            tokens = logits.argmax(-1)
            probs.append(logits.softmax(-1))
            if self.probs:
                tokens = torch.multinomial(probs[-1], 1)[:, 0]
            found.append(tokens)
        return Drafted(tokens=torch.stack(found, 1), probs=torch.stack(probs, 1) if self.probs else None)

    def _tree(self, batch: DraftBatch) -> Drafted:
        """Two levels: the second best and the best, then the best two behind each; four nodes and six in all."""
        rows = len(batch.tokens)
        best = self._best(batch.tokens[:, None], batch, 0, batch.positions[:, None], torch.ones(rows, 1, 1).bool())
        first = best[:, 0].flip(1)  # [R, 2]
        sees = torch.tensor([[True, True, False], [True, False, True]]).expand(rows, 2, 3)
        second = self._best(first, batch, 1, (batch.positions + 1)[:, None].expand(rows, 2), sees)  # [R, 2, 2]
        tokens = torch.cat((first, second[:, 1], second[:, 0]), 1)
        return Drafted(tokens=tokens, parents=torch.tensor([-1, -1, 1, 1, 0, 0]).expand(rows, 6))

    def _best(self, tokens: Tensor, batch: DraftBatch, first: int, positions: Tensor, sees: Tensor) -> Tensor:
        step = batch.step(first, positions, sees)
        hidden = self.model.forward(tokens.flatten(), positions.flatten(), step)
        return self.model.logits(hidden).topk(2).indices.view(*tokens.shape, 2)


class Watcher(ResidentSpeculator):
    """Keeps no KV but checks what it is shown: the states of every position, and the tokens behind it."""

    def __init__(self) -> None:
        self.seen: dict[int, dict[int, tuple[int, int, Tensor]]] = defaultdict(dict)  # slot -> position -> …
        self.drafts = 0

    def plan(self, checkpoint: Checkpoint | None = None) -> ResidentPlan:
        return ResidentPlan(taps=TargetTaps(hidden_layers=(1, 2), final_hidden=True))

    def load(self, target: Target) -> None:
        """Nothing to read."""

    def extend(self, batch: ExtendBatch) -> None:
        assert batch.hidden is not None
        assert batch.hidden.shape == (sum(batch.counts), 3, WIDTH)
        assert batch.last.tolist() == [sum(batch.counts[: i + 1]) - 1 for i in range(len(batch.counts))]
        slots = [slot for slot, n in zip(batch.slots.tolist(), batch.counts, strict=True) for _ in range(n)]
        rows = zip(slots, batch.positions.tolist(), batch.tokens.tolist(), batch.next_tokens.tolist(), strict=True)
        for row, (slot, position, token, following) in enumerate(rows):
            if position - 1 not in self.seen[slot]:
                self.seen[slot].clear()
            for stale in [at for at in self.seen[slot] if at >= position]:
                del self.seen[slot][stale]
            self.seen[slot][position] = token, following, batch.hidden[row].clone()

    def draft(self, batch: DraftBatch) -> Drafted:
        self.drafts += len(batch.rooms)
        for slot, position, token in zip(
            batch.slots.tolist(), batch.positions.tolist(), batch.tokens.tolist(), strict=True
        ):
            known = self.seen[slot]
            assert known[position - 1][1] == token, "the newest token is what followed the last item"
            self._check([known[at] for at in range(position)] if 0 in known else [])
        return Drafted(tokens=batch.tokens[:, None] + torch.arange(3) % VOCAB % 2)

    @staticmethod
    def _check(items: Sequence[tuple[int, int, Tensor]]) -> None:
        if not items:
            return
        tokens = [token for token, _, _ in items]
        assert tokens[1:] == [following for _, following, _ in items[:-1]]
        states = dense_states(tokens)
        torch.testing.assert_close(torch.stack([state for _, _, state in items]), states, atol=1e-4, rtol=0)


def dense_states(tokens: Sequence[int]) -> Tensor:
    """What a `Watcher` should see of a text: [T, 3, WIDTH]."""
    backend, pool = ReferenceAttention(SHAPE, 512), None
    pool = cut_pool(backend.kv_layout(), LAYERS, 1, torch.device("cpu"))
    step = StepForward(backend, pool, TargetTaps(hidden_layers=(1, 2)))
    runner = Runner(Small(), backend, pool, page_size=512, slots=1, max_len=400, device=torch.device("cpu"))
    count = len(tokens)
    runner._tokens[0, :count] = tokens
    entry = Entry(slot=0, start=0, count=count, samples=False, first_page=0, new_pages=[0])
    ids, positions, batch = runner._inputs([entry])
    step.begin(backend.plan(batch), tapping=True)
    final = Small().forward(ids, positions, step)
    return torch.stack([*step.tapped, final], 1)


class Chaos(ResidentSpeculator):
    """Random trees and chains, ids that don't exist, and now and then an error; some guesses are right."""

    def __init__(self) -> None:
        self._random = random.Random(2)

    def plan(self, checkpoint: Checkpoint | None = None) -> ResidentPlan:
        return ResidentPlan(kv=SHAPE, places=1)

    def load(self, target: Target) -> None:
        """Nothing to read."""

    def extend(self, batch: ExtendBatch) -> None:
        if self._random.random() < 0.1:
            raise RuntimeError("extend had a bad day")

    def draft(self, batch: DraftBatch) -> Drafted:
        kind, rows = self._random.randrange(5), len(batch.rooms)
        if kind == 0:
            raise RuntimeError("draft had a bad day")
        if kind == 1:
            return Drafted(tokens=torch.full((rows + 1, 2), 3))
        tokens = torch.tensor([[self._random.randrange(-2, VOCAB + 2) for _ in range(5)] for _ in range(rows)])
        parents = torch.tensor([[self._random.randrange(-1, max(1, i)) for i in range(5)] for _ in range(rows)])
        if kind == 2:
            return Drafted(tokens=tokens, counts=[self._random.randrange(6) for _ in range(rows)])
        return Drafted(tokens=tokens, parents=parents)


class Forester(Speculator):
    """A host speculator: bushes around what the target will say, given the truth."""

    def __init__(self, truth: dict[str, list[int]]) -> None:
        self._truth, self._random = truth, random.Random(4)

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        return [self._draft(context) for context in contexts]

    def _draft(self, context: DraftContext) -> Draft:
        done = len(context.tokens) - context.prompt_len
        truth = self._truth[context.request_id][done : done + 3]
        if len(truth) < 3:
            return Draft()
        wrong = [(token + 1 + self._random.randrange(VOCAB - 1)) % VOCAB for token in truth]
        tokens, parents = [wrong[0], truth[0], wrong[1], truth[1]], [None, None, 1, 1]
        return Draft([*tokens, truth[2]], [*parents, 3]) if self._random.random() < 0.8 else Draft(truth)


class Bench:
    """An engine and what its clients have received."""

    def __init__(self, engine: Engine, runner: Runner) -> None:
        self.engine, self.runner = engine, runner
        self.outputs: dict[str, list[Output]] = defaultdict(list)

    def serve(
        self, requests: dict[str, tuple[list[int], dict[str, Any]]], preempt: bool = False, alone: bool = False
    ) -> None:
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


@contextmanager
def bench(
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
        backend = ReferenceAttention(SHAPE, PAGE)
        pool = cut_pool(backend.kv_layout(), LAYERS, PAGES + 1, torch.device("cpu"))  # the last one is for padding
        made.append(
            kind(
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
        )
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


def prompt(seed: int, length: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(VOCAB) for _ in range(length)]


REQUESTS: dict[str, tuple[list[int], dict[str, Any]]] = {
    "greedy": (prompt(1, 5), {}),
    "long": (prompt(2, 37), {"max_tokens": 30}),
    "one": (prompt(3, 1), {}),
    "drawn": (prompt(4, 11), {"temperature": 1.0, "seed": 7}),
    "nucleus": (prompt(5, 9), {"temperature": 0.8, "top_p": 0.8, "top_k": 30, "min_p": 0.01, "seed": 8}),
    "logprobs": (prompt(6, 6), {"logprobs": 2}),
    "penalized": (prompt(7, 8), {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
    "biased": (prompt(8, 8), {"logit_bias": {3: 2.0, 5: -100.0}}),
    "told to stop": (prompt(9, 8), {"stop_token_ids": list(range(0, VOCAB, 9)), "min_tokens": 6}),
    "bad words": (prompt(10, 8), {"bad_word_ids": [(i, i + 1) for i in range(VOCAB - 1)] + [(17,)]}),
    "prompt again": (prompt(2, 37), {"prompt_logprobs": 1, "max_tokens": 8}),
    "same beginning": ([*prompt(2, 37)[:20], *prompt(11, 7)], {}),
}
"""Prompts and parameters of all kinds; two share a beginning."""


@pytest.fixture(scope="module")
def plain() -> Bench:
    """What comes without a speculator."""
    with bench() as it:
        it.serve(REQUESTS)
    return it


def assert_same_text(it: Bench, plain: Bench) -> None:
    for name in REQUESTS:
        assert it.tokens(name) == plain.tokens(name), name
        assert it.logprobs(name) == pytest.approx(plain.logprobs(name), abs=1e-4)


SPECULATORS: dict[str, Callable[[], ResidentSpeculator]] = {
    "twin": Mirror,
    "twin, tree": lambda: Mirror(tree=True),
    "chaos": Chaos,
}


@pytest.mark.parametrize("name", SPECULATORS)
@pytest.mark.parametrize(
    ("cache", "budget", "preempt"), [("radix", 64, False), ("paged", 7, False), ("radix", 13, True)], ids=str
)
@pytest.mark.usefixtures("one_thread")
def test_residents_leave_the_text_as_it_is(name: str, cache: str, budget: int, preempt: bool, plain: Bench) -> None:
    resident = SPECULATORS[name]()
    with bench(resident, cache=cache, budget=budget, most=6 if "tree" in name else MOST) as it:
        it.serve(REQUESTS, preempt)
        assert_same_text(it, plain)
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.drafted > 20
        assert bool(counters.faults) == (name == "chaos")


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.usefixtures("one_thread")
def test_residents_see_the_target_s_states_of_every_token_that_stands(budget: int, plain: Bench) -> None:
    watcher = Watcher()
    with bench(watcher, budget=budget) as it:
        it.serve(REQUESTS, alone=True)
        assert_same_text(it, plain)
        assert it.engine.drafter is not None
        assert watcher.drafts > 80
        assert it.engine.drafter.counters.faults == 0


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("budget", [64, 6])
@pytest.mark.usefixtures("one_thread")
def test_the_twin_s_chains_are_all_accepted(cache: str, budget: int, plain: Bench) -> None:
    """So its KV is right: behind chunks, prefix hits and preemptions, with neighbours that take its pages."""
    greedy = {name: asked for name, asked in REQUESTS.items() if name in ("greedy", "long", "one", "same beginning")}
    with bench(Mirror(), cache=cache, budget=budget) as it:
        for _ in range(2):
            it.outputs.clear()
            it.serve(greedy, preempt=True)
            for name in greedy:
                assert it.tokens(name) == plain.tokens(name)
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.drafted > 100
        assert counters.accepted == counters.drafted


@pytest.mark.usefixtures("one_thread")
def test_the_twin_s_trees_hold_the_target_s_path(plain: Bench) -> None:
    """Two of the six nodes are accepted in every step, and their KV has moved to where they stand."""
    with bench(Mirror(tree=True), most=6) as it:
        it.serve({"greedy": (prompt(1, 5), {"max_tokens": 31})})
        assert it.tokens("greedy")[:20] == plain.tokens("greedy")
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.accepted_at[:2] == [10, 9]  # the last one has no room for both


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.usefixtures("one_thread")
def test_trees_from_the_host_leave_the_text_as_it_is(trees: bool, plain: Bench) -> None:
    truth = {name: plain.tokens(name) for name in REQUESTS}
    with bench(Forester(truth), trees=trees, most=6) as it:
        it.serve(REQUESTS)
        assert_same_text(it, plain)
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.accepted > counters.steps if trees else counters.accepted > 0


@pytest.mark.usefixtures("one_thread")
def test_forms_hold_along_every_branch() -> None:
    """Masks are filled behind drafts that only the runner knows."""
    asked = {name: (prompt(20 + i, 9), {"structured": spec}) for i, (name, spec) in enumerate(SPECS.items())}
    with bench(grammar=True) as it:
        it.serve(asked)
    for resident in (Mirror(), Mirror(tree=True), Chaos()):
        with bench(resident, grammar=True, most=6) as drafted:
            drafted.serve(asked)
            for name in asked:
                assert drafted.tokens(name) == it.tokens(name)


@pytest.mark.usefixtures("one_thread")
def test_drafts_with_probabilities_are_sound_in_a_batch() -> None:
    """Sampled chains: every request gets its tokens, and greedy ones their own."""
    asked = {"greedy": (prompt(1, 5), {}), **{f"{i}": (prompt(i, 6), {"temperature": 1.0}) for i in range(30, 34)}}
    with bench() as plain_bench:
        plain_bench.serve(asked)
    with bench(Mirror(probs=True)) as it:
        it.serve(asked)
        assert it.tokens("greedy") == plain_bench.tokens("greedy")
        assert all(len(it.tokens(name)) == 20 for name in asked)
        assert it.engine.drafter is not None
        assert it.engine.drafter.counters.accepted > 0.5 * it.engine.drafter.counters.drafted


@pytest.mark.parametrize(
    ("names", "budget", "preempt"),
    [
        (("greedy", "same beginning"), 64, False),
        (("greedy", "same beginning"), 13, True),
        (("one", "drawn"), 64, False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("one_thread")
def test_chains_that_stay_on_the_device_leave_the_text_as_it_is(
    names: Sequence[str], budget: int, preempt: bool, plain: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of CUDA: verified, followed and drafted anew without the host; all of the twin's chains are accepted."""
    pytest.importorskip("triton")
    from engine.cuda import drafts
    from engine.cuda.runner import CudaRunner

    steps: list[int] = []
    follow = drafts.DeviceDrafting.follow
    monkeypatch.setattr(drafts.DeviceDrafting, "follow", lambda self, n: (steps.append(n), follow(self, n))[1])
    asked = {n: (REQUESTS[n][0], REQUESTS[n][1] | {"max_tokens": 12}) for n in names}
    with bench(Mirror(), budget=budget, kind=partial(CudaRunner, token_budget=64, graphs=False)) as it:
        it.serve(asked, preempt)
        for request in asked:
            assert it.tokens(request) == plain.tokens(request)[:12], request
        assert len(steps) >= 2, "hardly a step stayed on the device"
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.faults == 0
        assert "drawn" in names or counters.accepted == counters.drafted > 10
