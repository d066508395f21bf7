"""The verifier: greedy text never changes, sampled text keeps the target's distribution."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampler import Row, sample
from engine.sampling_params import SamplingParams
from engine.verifier import accept_equal, verify_chain

VOCAB = 5
TARGET = torch.softmax(torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 1.5, -1)
"""Rows of a target whose next token does not depend on the last, so that expected frequencies are known."""


def rows_of(seed: int, count: int, **params: float) -> list[Row]:
    given_params = SamplingParams(**params)  # type: ignore[arg-type]
    return [Row(given_params, seed, 10 + i, np.zeros(10 + i, dtype=np.int64), 10) for i in range(count)]


@given(st.lists(st.integers(0, 9), max_size=6), st.lists(st.integers(0, 9), min_size=7, max_size=7))
def test_accepts_up_to_the_first_difference(drafts: list[int], sampled: list[int]) -> None:
    emitted = accept_equal(sampled, drafts)
    assert emitted == sampled[: len(emitted)]
    agreed = len(emitted) - 1
    assert drafts[:agreed] == sampled[:agreed]
    assert agreed == len(drafts) or drafts[agreed] != sampled[agreed]


@pytest.mark.parametrize("drafts", [[], [0], [3, 1], [4, 4, 4]])
def test_greedy_emits_what_plain_decoding_would(drafts: list[int]) -> None:
    logits = torch.log(TARGET)[[i % 3 for i in range(len(drafts) + 1)]]
    best = logits.argmax(-1).tolist()
    emitted = verify_chain(logits.clone(), rows_of(0, len(drafts) + 1, temperature=0.0), drafts)
    assert emitted == best[: len(emitted)]


def test_point_mass_drafts_leave_seeded_text_unchanged() -> None:
    logits = torch.log(TARGET)
    for seed in range(200):
        rows = rows_of(seed, 3, temperature=1.0)
        plain = sample(logits.clone(), rows)
        for draft in ([plain[0], plain[1]], [plain[0], (plain[1] + 1) % VOCAB], [(plain[0] + 1) % VOCAB, 0]):
            emitted = verify_chain(logits.clone(), rows, draft)
            assert emitted == plain[: len(emitted)]


def chi_square(counts: np.ndarray, probs: torch.Tensor) -> float:
    expected = counts.sum() * probs.double().numpy()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.parametrize("sharpness", [0.0, 1.0, 4.0])
def test_sampled_drafts_keep_the_target_distribution(sharpness: float) -> None:
    q = torch.softmax(torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(9)) * sharpness, -1)
    first, second = np.zeros(VOCAB), np.zeros(VOCAB)
    generator = torch.Generator().manual_seed(1)
    drafts = torch.stack([torch.multinomial(q[i], 12_000, replacement=True, generator=generator) for i in range(2)], 1)
    for seed, draft in enumerate(drafts.tolist()):
        emitted = verify_chain(torch.log(TARGET), rows_of(seed, 3, temperature=1.0), draft, q)
        first[emitted[0]] += 1
        if len(emitted) > 1:
            second[emitted[1]] += 1
    assert chi_square(first, TARGET[0]) < 18.5  # 4 degrees of freedom, 0.1 %
    assert chi_square(second, TARGET[1]) < 18.5


def test_a_draft_outside_the_target_is_never_emitted() -> None:
    target = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 2)
    q = torch.tensor([[0.0, 0.0, 1.0, 0.0, 0.0]])
    for seed in range(300):
        emitted = verify_chain(torch.log(target), rows_of(seed, 2, temperature=1.0), [2], q)
        assert len(emitted) == 1
        assert emitted[0] in (0, 1)


def test_equal_distributions_accept_every_draft() -> None:
    for seed in range(100):
        emitted = verify_chain(torch.log(TARGET[:2]), rows_of(seed, 2, temperature=1.0), [1], TARGET[:1])
        assert emitted[0] == 1
        assert len(emitted) == 2
