"""Conformance suite for speculators: drafts are valid, bounded, repeatable and harmless, and `forget` leaves nothing.

The target is a toy: a fixed rule from the last two tokens to the next. Drafts go through the engine's own verifier.
"""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from engine.plugin import Flag, Needs, Offer
from engine.sampler import Row
from engine.sampling_params import SamplingParams
from engine.specs.speculator import Draft, DraftContext, ResidentSpeculator, Speculator
from engine.testing.claims import proves
from engine.testing.distribution import VOCAB, check_distribution, texts_before
from engine.testing.resident import PROFILE, ResidentChecks
from engine.verifier import verify as verified


def streams() -> dict[str, list[int]]:
    """Token streams that index structures find hard: constant, periodic, self-similar, never repeating, extreme."""
    rng = random.Random(7)
    thue_morse = [bin(i).count("1") % 2 for i in range(200)]
    return {
        "empty": [],
        "one": [3],
        "constant": [5] * 120,
        "period two": [1, 2] * 60,
        "period three, broken": [1, 2, 3] * 20 + [9] + [1, 2, 3] * 20,
        "thue-morse": thue_morse,
        "two letters": [rng.randrange(2) for _ in range(200)],
        "no repeat": list(range(VOCAB)),
        "random": [rng.randrange(VOCAB) for _ in range(200)],
        "quoted": [rng.randrange(VOCAB) for _ in range(60)] * 2,
        "extreme ids": [0, VOCAB - 1] * 30,
    }


def rule(tokens: Sequence[int]) -> int:
    """The toy target's next token."""
    return (tokens[-1] * 5 + tokens[-2] * 3 + 1) % 11


class SpeculatorConformance(ResidentChecks):
    """Subclasses set `offer` and `module`; see `OfferConformance`. Residents are held to `ResidentChecks` alone."""

    offer: ClassVar[Offer[Any]]
    max_draft: ClassVar[int] = 5

    @pytest.fixture
    def speculator(self) -> Speculator:
        """A fresh one."""
        return self.build()

    def build(self) -> Speculator:
        """Make one from the options of the suite."""
        built = self.offer.build(self.options(), profile=PROFILE, max_running=8)
        if isinstance(built, ResidentSpeculator):
            pytest.skip(f"{self.offer.name} is a resident")
        assert isinstance(built, Speculator)
        return built

    def context(
        self, speculator: Speculator, request_id: str, tokens: Sequence[int], new: int, max_tokens: int | None = None
    ) -> DraftContext:
        """A context whose hidden states, if the speculator taps any, are a fixed function of the new tokens."""
        taps = speculator.taps()
        width = len(taps.hidden_layers) + taps.final_hidden
        hidden = None
        if width:
            seeds = torch.tensor(list(tokens[len(tokens) - new :]), dtype=torch.float32).view(-1, 1, 1)
            hidden = torch.sin(seeds + torch.arange(width * PROFILE.hidden_size).view(1, width, PROFILE.hidden_size))
        room = self.max_draft if max_tokens is None else max_tokens
        return DraftContext(request_id, tokens, min(2, len(tokens)), room, hidden)

    def feed(
        self, speculator: Speculator, request_id: str, stream: Sequence[int]
    ) -> Iterator[tuple[DraftContext, Draft]]:
        """Propose along a stream that grows by 1, 2, 3, 1, … tokens, as accepted drafts make it grow."""
        tokens: list[int] = []
        for step in range(len(stream) + 1):
            grown = stream[len(tokens) : len(tokens) + 1 + step % 3]
            tokens.extend(grown)
            context = self.context(
                speculator, request_id, tokens, len(grown), max_tokens=(step * 3) % (self.max_draft + 1)
            )
            (draft,) = speculator.propose([context])
            yield context, draft
            if len(tokens) == len(stream):
                return

    def test_drafts_are_valid_on_any_stream(self, speculator: Speculator) -> None:
        """Never more than asked for; ids of the vocabulary; parents before children; probabilities that sum to one."""
        for name, stream in streams().items():
            for context, draft in self.feed(speculator, name, stream):
                check_draft(draft, context.max_tokens)

    def test_contexts_are_left_as_they_were(self, speculator: Speculator) -> None:
        """Tokens are the scheduler's own list: a speculator that writes to it changes the text."""
        for name, stream in streams().items():
            given = list(stream)
            speculator.propose([self.context(speculator, name, given, len(given))])
            assert given == stream

    @proves("flags:tree_drafts", "flags:draft_probs")
    def test_declared_flags_are_what_it_does(self, speculator: Speculator) -> None:
        """Trees and sampled drafts come only from those that declare them."""
        flags = self.offer.capabilities.flags
        for name, stream in streams().items():
            for _, draft in self.feed(speculator, name, stream):
                assert draft.parents is None or Flag.TREE_DRAFTS in flags
                assert draft.probs is None or Flag.DRAFT_PROBS in flags

    @proves("flags:draft_probs")
    def test_sampled_drafts_come_with_their_distribution(self, speculator: Speculator) -> None:
        """Each of them; and a speculator that claims to sample drafts something."""
        self.require(Needs(flags=frozenset({Flag.DRAFT_PROBS})))
        drafts = [draft for name, stream in streams().items() for _, draft in self.feed(speculator, name, stream)]
        assert any(draft.tokens for draft in drafts), "nothing was drafted"
        assert all(draft.probs is not None for draft in drafts if draft.tokens)

    @proves("contract", "flags:draft_probs")
    @pytest.mark.usefixtures("one_thread")
    def test_sampled_text_keeps_the_target_s_distribution(self, speculator: Speculator) -> None:
        """Two tokens after drafts of up to two, 2,000 times: the chi-square of the pairs stays below one in a million.

        Each trial is a request of its own, so a speculator that samples must draw anew for each.
        """
        check_distribution(lambda name, tokens: speculator.propose([self.context(speculator, name, tokens, 6, 2)])[0])

    def test_same_tokens_same_drafts(self) -> None:
        """Two fresh speculators agree; a request that was forgotten starts afresh."""
        first, second = self.build(), self.build()
        for name, stream in streams().items():
            once = [list(draft.tokens) for _, draft in self.feed(first, name, stream)]
            assert once == [list(draft.tokens) for _, draft in self.feed(second, name, stream)]
            second.forget(name)
            assert once == [list(draft.tokens) for _, draft in self.feed(second, name, stream)]

    def test_requests_do_not_see_each_other(self) -> None:
        """A batch gets, in its order, what each request would get alone."""
        alone, together = self.build(), self.build()
        named = [(name, stream) for name, stream in streams().items() if stream]
        expected = [alone.propose([self.context(alone, name, s, len(s))])[0].tokens for name, s in named]
        drafts = together.propose([self.context(together, name, s, len(s)) for name, s in named])
        assert [list(d.tokens) for d in drafts] == [list(tokens) for tokens in expected]

    def test_no_contexts_no_drafts(self, speculator: Speculator) -> None:
        """An empty batch is a batch."""
        assert list(speculator.propose([])) == []

    def test_unknown_requests_are_no_news(self, speculator: Speculator) -> None:
        """`forget` and `accepted` may name requests that never drafted or are gone."""
        speculator.forget("never seen")
        speculator.accepted("never seen", 3, 1)
        check_draft(speculator.propose([self.context(speculator, "a", [1, 2, 1, 2], 4)])[0], self.max_draft)

    def test_forget_frees(self, speculator: Speculator) -> None:
        """After a thousand requests of 200 tokens no more is held than after the first hundred."""

        def serve(count: int) -> int:
            for i in range(count):
                tokens = [(i * 31 + j * j) % VOCAB for j in range(200)]
                speculator.propose([self.context(speculator, f"request {i}", tokens, len(tokens))])
                speculator.accepted(f"request {i}", 2, 1)
                speculator.forget(f"request {i}")
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        tracemalloc.start()
        try:
            before = serve(100)
            assert serve(1000) - before < 100_000  # bytes; one request's tokens alone would come to 1,000 times 1.6 kB
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize("spoil", ["right", "wrong", "invalid", "late", "empty", "own"])
    def test_greedy_text_is_the_target_s(self, speculator: Speculator, spoil: str) -> None:
        """Right, wrong, invalid and empty drafts, and the speculator's own: always the text of the target alone."""
        prompt = [1, 2]
        expected = list(prompt)
        while len(expected) < 90:
            expected.append(rule(expected))
        tokens, new, steps = list(prompt), len(prompt), 0
        while len(tokens) < 90:
            (draft,) = speculator.propose([self.context(speculator, "r", tokens, new)])
            drafts = SPOILERS[spoil](draft, expected[len(tokens) : len(tokens) + self.max_draft])
            emitted = verify(tokens, drafts)
            assert 1 <= len(emitted) <= len(drafts.tokens) + 1
            speculator.accepted("r", len(drafts.tokens), len(emitted) - 1)
            tokens += emitted
            new, steps = len(emitted), steps + 1
        assert tokens[:90] == expected
        if spoil == "right":
            assert steps <= 90 / self.max_draft


SPOILERS: dict[str, Callable[[Draft, list[int]], Draft]] = {
    "right": lambda draft, truth: Draft(truth),
    "wrong": lambda draft, truth: Draft([(t + 1) % 11 for t in truth]),
    "invalid": lambda draft, truth: Draft([*truth[:2], VOCAB + 5, 2**40]),
    "late": lambda draft, truth: Draft([*truth[:-1], 12]),
    "empty": lambda draft, truth: Draft(),
    "own": lambda draft, truth: draft,
}
"""What is verified in place of a draft, given the draft and what the target will say."""


def verify(tokens: Sequence[int], draft: Draft) -> list[int]:
    """What the engine's verifier emits for the toy target after `tokens`."""
    logits = torch.zeros(len(draft.tokens) + 1, VOCAB)
    rows = []
    for i, seen in enumerate(texts_before(tokens, draft)):
        logits[i, rule(seen)] = 9.0
        rows.append(Row(SamplingParams(temperature=0.0), 0, len(seen), np.array(seen, dtype=np.int64), 2))
    return verified(logits, rows, [draft])[0].tokens


def check_draft(draft: Draft, max_tokens: int) -> None:
    """Assert that a draft keeps the contract for the given room."""
    n = len(draft.tokens)
    assert n <= max_tokens, f"{n} draft tokens where {max_tokens} may be proposed"
    assert all(isinstance(t, int) and 0 <= t < VOCAB for t in draft.tokens)
    if draft.parents is not None:
        assert len(draft.parents) == n
        assert all(p is None or 0 <= p < i for i, p in enumerate(draft.parents)), "a parent comes after its child"
        assert len(set(zip(draft.parents, draft.tokens, strict=True))) == n, "two siblings are the same token"
    if draft.probs is not None:
        assert draft.probs.shape == (n, VOCAB)
        torch.testing.assert_close(draft.probs.sum(-1), torch.ones(n))
        assert all(float(draft.probs[i, token]) > 0.0 for i, token in enumerate(draft.tokens)), "a token of chance 0"


__all__ = ["PROFILE", "VOCAB", "SpeculatorConformance", "check_draft", "streams"]
