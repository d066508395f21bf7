"""Conformance checks for residents, part of the suite for speculators: the text is the target's, drafts are sound.

The target is a tiny random Llama that the installed plugins serve; subclasses that need another one override the
fixture `target`, and say with `options` what their speculator is to be made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.discovery import Entry
from engine.errors import EngineError
from engine.hooks import HOOK_API, hookimpl
from engine.llm import LLM
from engine.plugin import Flag, KVKind, Offer, Options
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.specs.model import Forward, ModelProfile
from engine.specs.speculator import (
    Checkpoint,
    DraftBatch,
    Drafted,
    ExtendBatch,
    ResidentPlan,
    ResidentSpeculator,
    Target,
)
from engine.testing.claims import proves
from engine.testing.distribution import VOCAB
from engine.testing.offer import OfferConformance
from engine.testing.tokenizer import save_byte_tokenizer

PROFILE = ModelProfile(
    architecture="Toy",
    layers=2,
    hidden_size=16,
    vocab_size=VOCAB,
    max_context=4096,
    kv_kind=KVKind.GQA,
    heads=2,
    kv_heads=1,
    head_dim=8,
    v_head_dim=8,
    scale=8**-0.5,
    windows=(None, None),
    softcap=None,
    dtype="float32",
    eos_token_ids=(0,),
    parameters=10_000,
)
"""The profile that the suite builds with."""

DRAFTS = 4
BASE = (
    "model.dtype=float32",
    "model.max_context=128",
    "kv_cache.page_size=16",
    "kv_cache.pages=64",
    "device.threads=1",
    "scheduler.max_running=8",
    "grammar=none",
    "speculator.controller=false",
    f"speculator.max_draft={DRAFTS}",
)
PROMPTS = [[(7 * i + 11 * j * j + 3) % 120 for j in range(length)] for i, length in enumerate((3, 20, 37, 9))]


@dataclass(slots=True)
class Watched(ResidentSpeculator):
    """A resident whose every answer is held to the contract. Complaints are kept, since the engine survives errors."""

    inner: ResidentSpeculator
    vocab: int = 0
    places: int = 0
    slots: int = 0
    complaints: list[str] = field(default_factory=list)
    drafts: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    """(position, newest token) -> what was drafted, as much of it as there was room for."""
    shared: set[tuple[int, int]] = field(default_factory=set)
    """Those of two requests at once."""
    trees: bool = False
    sampled: bool = False

    def plan(self, checkpoint: Checkpoint) -> ResidentPlan:
        plan = self.inner.plan(checkpoint)
        self.places, self.vocab = plan.places, checkpoint.profile.vocab_size
        layers = plan.taps.hidden_layers
        self._hold(all(0 <= x <= checkpoint.profile.layers for x in layers), f"taps layers {layers}, which don't exist")
        self._hold(list(layers) == sorted(set(layers)), f"taps layers {layers} out of order, where they come in order")
        return plan

    def load(self, target: Target) -> None:
        self.slots = target.slots
        self.inner.load(target)

    def extend(self, batch: ExtendBatch) -> None:
        before = [x.clone() for x in (batch.tokens, batch.next_tokens, batch.positions)]
        self.inner.extend(batch)
        after = (batch.tokens, batch.next_tokens, batch.positions)
        self._hold(all(map(torch.equal, before, after)), "extend has changed the batch, which is the runner's")

    def draft(self, batch: DraftBatch) -> Drafted:
        checked: Any = _Checked(batch, self)
        drafted = self.inner.draft(checked)
        self._check(batch, drafted)
        return drafted

    def _check(self, batch: DraftBatch, drafted: Drafted) -> None:
        rows, nodes = drafted.tokens.shape
        counts = [nodes] * rows if drafted.counts is None else drafted.counts
        self._hold(rows == len(batch.rooms), f"{rows} rows of drafts for {len(batch.rooms)} requests")
        self._hold(all(0 <= n <= nodes for n in counts), f"counts {counts} of rows that have {nodes} nodes")
        self.trees |= drafted.parents is not None
        self.sampled |= drafted.probs is not None
        for row, count in enumerate(counts):
            tokens = drafted.tokens[row, :count].tolist()
            self._hold(all(0 <= t < self.vocab for t in tokens), f"tokens {tokens} outside the vocabulary")
            key, kept = (int(batch.positions[row]), int(batch.tokens[row])), tokens[: batch.rooms[row]]
            if self.drafts.setdefault(key, kept) != kept:
                self.shared.add(key)
            if drafted.parents is not None:
                parents = drafted.parents[row, :count].tolist()
                self._hold(all(-1 <= p < i for i, p in enumerate(parents)), f"parents {parents} after their children")
                self._hold(len(set(zip(parents, tokens, strict=True))) == count, "two siblings are the same token")
            if drafted.probs is not None:
                sums = drafted.probs[row, :count].sum(-1)
                self._hold(bool(torch.allclose(sums, torch.ones_like(sums))), "probabilities that don't sum to one")

    def _hold(self, kept: bool, words: str) -> None:
        if not kept:
            self.complaints.append(words)


class _Checked:
    """A draft batch that sees which places are taken."""

    def __init__(self, batch: DraftBatch, watched: Watched) -> None:
        self._batch, self._watched = batch, watched

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batch, name)

    def step(self, first: int, positions: Tensor, sees: Tensor | None = None) -> Forward:
        """Pass on, if the places were planned."""
        hold, (rows, count) = self._watched._hold, positions.shape
        hold(rows == len(self._batch.rooms), f"positions of {rows} requests, where there are {len(self._batch.rooms)}")
        places = self._watched.places
        hold(first + count <= places, f"place {first + count - 1}, where {places} are planned")
        if sees is not None:
            hold(sees.shape == (rows, count, first + count), f"a mask {tuple(sees.shape)} for {count} items at {first}")
        return self._batch.step(first, positions, sees)


class ResidentChecks(OfferConformance):
    """Skipped for speculators of the host."""

    offer: ClassVar[Offer[Any]]

    @pytest.fixture
    def target(self, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> Path:
        """A folder that can be served."""
        folder = tmp_path / "target"
        folder.mkdir()
        for file in tiny_checkpoint("LlamaForCausalLM").iterdir():
            (folder / file.name).symlink_to(file)
        save_byte_tokenizer(folder)
        return folder

    @contextmanager
    def served(self, target: Path, *more: str) -> Iterator[tuple[LLM, Watched]]:
        """An engine with the offer's resident; skips where there is none, or where it can't draft for this target."""
        if not isinstance(self.offer.build(self.options(), profile=PROFILE, max_running=8), ResidentSpeculator):
            pytest.skip(f"{self.offer.name} is a speculator of the host")
        made: list[Watched] = []

        def build(options: Options, **context: Any) -> ResidentSpeculator:
            made.append(Watched(self.offer.build(self.options(), **context)))
            return made[0]

        offer = Offer(name="watched", summary="watched", build=build, capabilities=self.offer.capabilities)
        plugin = SimpleNamespace(speculators=hookimpl(lambda: [offer]))
        entry = Entry(name="kit.watched", distribution="kit", version="0", api=HOOK_API, load=lambda: plugin)
        registry = Registry([*Registry.discover().entries, entry])
        try:
            llm = LLM(None, [*BASE, f"model.source=path:{target}", "speculator.use=watched", *more], registry)
        except EngineError as error:
            pytest.skip(f"{self.offer.name} has no draft for this target: {error}")
        with llm:
            yield llm, made[0]

    def texts(self, llm: LLM, prompts: Sequence[list[int]], **params: Any) -> list[list[int]]:
        """What comes of the prompts, all at once."""
        chosen = SamplingParams(**{"temperature": 0.0, "max_tokens": 24, "ignore_eos": True, **params})
        return [done.token_ids for done in llm.generate(list(prompts), chosen)]

    @pytest.mark.parametrize("more", [(), ("kv_cache.use=paged", "scheduler.prefill_chunk=5")], ids=["whole", "chunks"])
    def test_the_text_with_a_resident_is_the_target_s(self, target: Path, more: tuple[str, ...]) -> None:
        """Greedy and seeded, alone and together, cold and with cached prefixes; and nothing it does is a fault."""
        rounds: list[dict[str, Any]] = [{}, {}, {"temperature": 1.0, "seed": 5}]
        with self.served(target, *more) as (llm, watched):
            got = [self.texts(llm, PROMPTS, **params) for params in rounds] + [self.texts(llm, PROMPTS[:1])]
            assert llm.engine.drafter is not None
            counters = llm.engine.drafter.counters
            assert counters.drafted > 0, "nothing was drafted"
            assert (watched.complaints, counters.faults) == ([], 0)
        with LLM(None, [*BASE, f"model.source=path:{target}", *more]) as llm:
            want = [self.texts(llm, PROMPTS, **params) for params in rounds] + [self.texts(llm, PROMPTS[:1])]
        if not watched.sampled:
            assert got == want
        assert [got[0], got[1], got[3]] == [want[0], want[1], want[3]]

    @proves("contract", "flags:tree_drafts", "flags:draft_probs")
    def test_a_resident_drafts_what_it_declares(self, target: Path) -> None:
        """Trees and probabilities come only from those that declare them."""
        with self.served(target) as (llm, watched):
            self.texts(llm, PROMPTS)
        flags = self.offer.capabilities.flags
        assert not watched.trees or Flag.TREE_DRAFTS in flags
        assert not watched.sampled or Flag.DRAFT_PROBS in flags

    def test_a_resident_s_drafts_are_their_request_s_alone(self, target: Path) -> None:
        """A request is drafted for the same beside others, after others in its pages and slots, and alone."""
        with self.served(target) as (llm, watched):
            if watched.sampled or Flag.DRAFT_PROBS in self.offer.capabilities.flags:
                pytest.skip(f"{self.offer.name} draws its drafts")
            self.texts(llm, PROMPTS)
            together = dict(watched.drafts)
            watched.drafts.clear()
            for prompt in PROMPTS[::-1]:
                self.texts(llm, [prompt])
        common = together.keys() & watched.drafts.keys() - watched.shared
        assert len(common) > 10
        assert {key: together[key] for key in common} == {key: watched.drafts[key] for key in common}


__all__ = ["PROFILE", "ResidentChecks", "Watched"]
