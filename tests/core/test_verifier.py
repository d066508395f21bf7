"""The verifier: greedy text never changes, sampled text keeps the target's distribution, for chains and trees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from engine.sampler import Row, sample
from engine.sampling_params import SamplingParams
from engine.specs.speculator import Draft
from engine.trees import Parents, depths
from engine.verifier import Verified, accept_equal, follow, verify, verify_sampled

VOCAB = 5
TARGET = torch.softmax(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5, -1)
"""Rows of a target whose next token depends on its position alone, so that expected frequencies are known."""

NO_HISTORY = np.zeros(16, dtype=np.int64)


def rows_of(seed: int, places: Sequence[int], params: SamplingParams) -> list[Row]:
    return [Row(params, seed, 10 + place, NO_HISTORY[: 10 + place], 10) for place in places]


def places(draft: Draft) -> list[int]:
    """How far behind the last real token each row of a verification stands."""
    below = range(len(draft.tokens)) if draft.parents is None else depths(draft.parents)
    return [0, *(depth + 1 for depth in below)]


def verify_one(logits: Tensor, seed: int, draft: Draft, **params: float) -> Verified:
    given_params = SamplingParams(**params)  # type: ignore[arg-type]
    return verify(logits.clone(), rows_of(seed, places(draft), given_params), [draft])[0]


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_accepts_up_to_the_first_difference(drafts: list[int], sampled: list[int]) -> None:
    emitted = accept_equal(sampled, drafts)
    assert emitted == sampled[: len(emitted)]
    agreed = len(emitted) - 1
    assert drafts[:agreed] == sampled[:agreed]
    assert agreed == len(drafts) or drafts[agreed] != sampled[agreed]


@given(st.data())
def test_a_tree_is_followed_as_its_paths_would_be(data: st.DataObject) -> None:
    """Of all chains from the root, the one that agrees longest decides."""
    parents: list[int | None] = []
    tokens: list[int] = []
    for node in range(data.draw(st.integers(0, 8))):
        parent = data.draw(st.none() if not node else st.none() | st.integers(0, node - 1))
        taken = {tokens[i] for i in range(node) if parents[i] == parent}
        if free := sorted(set(range(4)) - taken):
            parents.append(parent)
            tokens.append(data.draw(st.sampled_from(free)))
        else:
            break
    sampled = data.draw(st.lists(st.integers(0, 3), min_size=len(tokens) + 1, max_size=len(tokens) + 1))
    emitted, path = follow(sampled, tokens, parents)
    assert [tokens[node] for node in path] == emitted[:-1]
    assert all(parents[node] == above for above, node in zip([None, *path], path, strict=False))
    assert emitted == [sampled[0], *(sampled[node + 1] for node in path)]
    last = path[-1] if path else None
    assert not [i for i, parent in enumerate(parents) if parent == last and tokens[i] == emitted[-1]]


@pytest.mark.parametrize("drafts", [[], [0], [3, 1], [4, 4, 4]])
def test_greedy_emits_what_plain_decoding_would(drafts: list[int]) -> None:
    logits = torch.log(TARGET)[[i % 3 for i in range(len(drafts) + 1)]]
    best = logits.argmax(-1).tolist()
    emitted = verify_one(logits, 0, Draft(drafts), temperature=0.0).tokens
    assert emitted == best[: len(emitted)]


@pytest.mark.parametrize("probs", [None, torch.full((4, VOCAB), 0.2)])
def test_greedy_follows_a_tree_to_the_target_s_own_tokens(probs: Tensor | None) -> None:
    first, second, third = TARGET.argmax(-1).tolist()
    draft = Draft([(first + 1) % VOCAB, first, (second + 1) % VOCAB, second], [None, None, 1, 1], probs)
    emitted, path = verify_one(torch.log(TARGET)[places(draft)], 0, draft, temperature=0.0)
    assert emitted == [first, second, third]
    assert path == [1, 3]


def test_point_mass_drafts_leave_seeded_text_unchanged() -> None:
    for seed in range(60):
        plain = sample(torch.log(TARGET), rows_of(seed, range(3), SamplingParams(temperature=1.0)))
        other = [(token + 1) % VOCAB for token in plain]
        for tokens, parents in (
            (plain[:2], None),
            ([plain[0], other[1]], None),
            ([other[0], 0], None),
            ([other[0], plain[0], other[1], plain[1]], [None, None, 1, 1]),
            ([plain[0], other[0], plain[1], other[1]], [None, None, 1, 0]),
        ):
            draft = Draft(tokens, parents)
            emitted = verify_one(torch.log(TARGET)[places(draft)], seed, draft, temperature=1.0).tokens
            assert emitted == plain[: len(emitted)]


def chi_square(counts: np.ndarray, probs: Tensor) -> float:
    expected = counts.sum() * probs.double().numpy()
    live = expected > 0
    assert not counts[~live].any(), "a token came out that the target never says"
    return float(((counts[live] - expected[live]) ** 2 / expected[live]).sum())


def proposals(shape: Parents, q: Tensor, draws: int, generator: torch.Generator) -> list[list[int]]:
    """Tokens of many trees of one shape: siblings drawn from q without replacement, float32 [VOCAB] each."""
    columns: list[Tensor] = []
    for node, parent in enumerate(shape):
        odds = q.expand(draws, VOCAB).clone()
        for sibling in range(node):
            if shape[sibling] == parent:
                odds.scatter_(1, columns[sibling][:, None], 0.0)
        columns.append(torch.multinomial(odds, 1, generator=generator)[:, 0])
    return torch.stack(columns, 1).tolist()  # type: ignore[no-any-return]


class Rows(Sequence[Row]):
    """The rows of many requests with one tree each, made when they are looked at; the seed is the request's number."""

    def __init__(self, at: Sequence[int], requests: int) -> None:
        self._at, self._requests, self._params = at, requests, SamplingParams(temperature=1.0)

    def __len__(self) -> int:
        return len(self._at) * self._requests

    def __getitem__(self, i: Any) -> Any:
        request, place = divmod(i, len(self._at))
        return Row(self._params, request, 10 + self._at[place], NO_HISTORY, 10)


SHAPES: dict[str, list[int | None]] = {"chain": [None, 0], "siblings": [None, None, 0], "bush": [None, None, 1, 1]}


@pytest.mark.parametrize(
    ("shape", "outside", "draws"), [("bush", True, 100_000), ("chain", False, 20_000), ("siblings", False, 20_000)]
)
def test_sampled_drafts_keep_the_target_distribution(shape: str, outside: bool, draws: int) -> None:
    """Drafts of one tree, verified at once: the chi-square of 4 degrees of freedom stays below one in 10,000."""
    generator = torch.Generator().manual_seed(11)
    q = torch.softmax(torch.randn(VOCAB, generator=generator), -1)
    if outside:  # two tokens are not of the draft's vocabulary
        q[[1, 4]] = 0.0
        q /= q.sum()
    parents = SHAPES[shape]
    probs = q.expand(len(parents), VOCAB)
    drafts = [Draft(tokens, parents, probs) for tokens in proposals(parents, q, draws, generator)]
    at = places(drafts[0])
    found = verify_sampled(TARGET[at].repeat(draws, 1), Rows(at, draws), drafts)
    first = np.bincount([one.tokens[0] for one in found], minlength=VOCAB)
    second = np.bincount([one.tokens[1] for one in found if len(one.tokens) > 1], minlength=VOCAB)
    assert len(first) == len(second) == VOCAB
    assert second.sum() > draws / 3, "hardly a draft was accepted"
    assert chi_square(first, TARGET[0]) < 23.5
    assert chi_square(second, TARGET[1]) < 23.5


def test_a_draft_outside_the_target_is_never_emitted() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 2)
    q = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]])
    for seed in range(60):
        emitted = verify_one(torch.log(target), seed, Draft([2], probs=q), temperature=1.0).tokens
        assert len(emitted) == 1
        assert emitted[0] in (0, 1)


def test_equal_distributions_accept_every_draft() -> None:
    for seed in range(60):
        emitted = verify_one(torch.log(TARGET[:2]), seed, Draft([1], probs=TARGET[:1]), temperature=1.0).tokens
        assert emitted[0] == 1
        assert len(emitted) == 2


def test_drafts_of_a_step_are_verified_apart() -> None:
    """A chain, a tree, none, and sampled ones: each as it would be alone."""
    q = torch.full((3, VOCAB), 0.2)
    drafts = [
        Draft([3, 1]),
        Draft([0, 2, 1], [None, None, 1]),
        Draft(),
        Draft([1, 2], probs=q[:2]),
        Draft([4, 1, 2], [None, None, 0], q),
    ]
    for seed in range(20):
        alone = [verify_one(torch.log(TARGET)[places(d)], seed, d, temperature=1.0) for d in drafts]
        at = [place for draft in drafts for place in places(draft)]
        rows = rows_of(seed, at, SamplingParams(temperature=1.0))
        assert verify(torch.log(TARGET)[at], rows, drafts) == alone
