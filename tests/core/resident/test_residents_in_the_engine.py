"""Residents and trees through scheduler, runner and real attention: whatever is drafted, the text is the target's own.

The target is a small random decoder whose next token depends on all tokens before through paged KV. One resident is the
same decoder with KV of its own, so that its drafts are all accepted just if its pages hold what they should.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Entry
from engine.kv_memory import cut_pool
from engine.plugins.attention.reference.backend import ReferenceAttention
from engine.runner import Runner, StepForward
from engine.specs.speculator import (
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
from engine.testing.grammar import SPECS
from engine.testing.twin import LAYERS, SHAPE, VOCAB, WIDTH, Small, Twin

MOST = 4


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


def assert_same_text(it: Any, plain: Any, names: Iterable[str]) -> None:
    for name in names:
        assert it.tokens(name) == plain.tokens(name), name
        assert it.logprobs(name) == pytest.approx(plain.logprobs(name), abs=1e-4)


SPECULATORS: dict[str, Callable[[], ResidentSpeculator]] = {
    "twin": Twin,
    "twin, tree": lambda: Twin(tree=True),
    "chaos": Chaos,
}


@pytest.mark.parametrize("name", SPECULATORS)
@pytest.mark.parametrize(
    ("cache", "budget", "preempt"), [("radix", 64, False), ("paged", 7, False), ("radix", 13, True)], ids=str
)
@pytest.mark.usefixtures("one_thread")
def test_residents_leave_the_text_as_it_is(
    name: str, cache: str, budget: int, preempt: bool, bench: Any, asked: Any, plain: Any
) -> None:
    resident = SPECULATORS[name]()
    with bench(resident, cache=cache, budget=budget, most=6 if "tree" in name else MOST) as it:
        it.serve(asked, preempt)
        assert_same_text(it, plain, asked)
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.drafted > 20
        assert bool(counters.faults) == (name == "chaos")


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.usefixtures("one_thread")
def test_residents_see_the_target_s_states_of_every_token_that_stands(
    budget: int, bench: Any, asked: Any, plain: Any
) -> None:
    watcher = Watcher()
    with bench(watcher, budget=budget) as it:
        it.serve(asked, alone=True)
        assert_same_text(it, plain, asked)
        assert it.engine.drafter is not None
        assert watcher.drafts > 80
        assert it.engine.drafter.counters.faults == 0


@pytest.mark.parametrize("cache", ["paged", "radix"])
@pytest.mark.parametrize("budget", [64, 6])
@pytest.mark.usefixtures("one_thread")
def test_the_twin_s_chains_are_all_accepted(cache: str, budget: int, bench: Any, asked: Any, plain: Any) -> None:
    """So its KV is right: behind chunks, prefix hits and preemptions, with neighbours that take its pages."""
    greedy = {name: asked for name, asked in asked.items() if name in ("greedy", "long", "one", "same beginning")}
    with bench(Twin(), cache=cache, budget=budget) as it:
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
def test_the_twin_s_trees_hold_the_target_s_path(bench: Any, asked: Any, plain: Any) -> None:
    """Two of the six nodes are accepted in every step, and their KV has moved to where they stand."""
    with bench(Twin(tree=True), most=6) as it:
        it.serve({"greedy": (asked["greedy"][0], {"max_tokens": 31})})
        assert it.tokens("greedy")[:20] == plain.tokens("greedy")
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.accepted_at[:2] == [10, 9]  # the last one has no room for both


@pytest.mark.parametrize("trees", [True, False], ids=["trees", "chains"])
@pytest.mark.usefixtures("one_thread")
def test_trees_from_the_host_leave_the_text_as_it_is(trees: bool, bench: Any, asked: Any, plain: Any) -> None:
    truth = {name: plain.tokens(name) for name in asked}
    with bench(Forester(truth), trees=trees, most=6) as it:
        it.serve(asked)
        assert_same_text(it, plain, asked)
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.accepted > counters.steps if trees else counters.accepted > 0


@pytest.mark.usefixtures("one_thread")
def test_forms_hold_along_every_branch(bench: Any, prompt: Any) -> None:
    """Masks are filled behind drafts that only the runner knows."""
    asked = {name: (prompt(20 + i, 9), {"structured": spec}) for i, (name, spec) in enumerate(SPECS.items())}
    with bench(grammar=True) as it:
        it.serve(asked)
    for resident in (Twin(), Twin(tree=True), Chaos()):
        with bench(resident, grammar=True, most=6) as drafted:
            drafted.serve(asked)
            for name in asked:
                assert drafted.tokens(name) == it.tokens(name)


@pytest.mark.usefixtures("one_thread")
def test_drafts_with_probabilities_are_sound_in_a_batch(bench: Any, prompt: Any) -> None:
    """Sampled chains: every request gets its tokens, and greedy ones their own."""
    asked = {
        "greedy": (prompt(1, 5), {}),
        **{f"{i}": (prompt(i, 6), {"temperature": 1.0, "seed": i}) for i in range(30, 34)},
    }
    with bench() as plain_bench:
        plain_bench.serve(asked)
    with bench(Twin(probs=True)) as it:
        it.serve(asked)
        assert it.tokens("greedy") == plain_bench.tokens("greedy")
        assert all(len(it.tokens(name)) == 20 for name in asked)
        assert it.engine.drafter is not None
        # Drawn from the target's own distribution, all drafts of the four are kept: about as many steps as the greedy
        # one takes alone, whose drafts are drawn too and hardly ever fit.
        assert it.engine.drafter.counters.accepted > 0.4 * it.engine.drafter.counters.drafted
