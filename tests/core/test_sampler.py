"""Sampling against plain definitions of each parameter."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from engine.randomness import Stream, uniform
from engine.sampler import Row, distribution, draw, endings, forbid, reshape, sample, top_logprobs
from engine.sampling_params import SamplingParams


def row(history: list[int] | None = None, prompt_len: int = 0, banned: tuple[int, ...] = (), **params: Any) -> Row:
    history = history or []
    return Row(SamplingParams(**params), params.get("seed") or 0, len(history), np.array(history), prompt_len, banned)


def expected_nucleus(probs: torch.Tensor, top_p: float) -> set[int]:
    order = torch.argsort(probs, descending=True)
    kept, mass = set(), 0.0
    for token in order.tolist():
        if mass >= top_p:
            break
        kept.add(token)
        mass += float(probs[token])
    return kept


def test_greedy_takes_the_first_maximum() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 0.0, 0.0]])
    assert sample(logits, [row(temperature=0.0), row(temperature=0.0)]) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-320])
def test_a_temperature_next_to_zero_is_nearly_greedy(temperature: float) -> None:
    probs = distribution(torch.tensor([[0.0, 3.0, 2.9, -1.0]]), [row(temperature=temperature)])
    assert probs[0].tolist() == [0.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize("vocab", [50, 3000])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999])
def test_top_p_keeps_the_smallest_set_that_reaches_the_mass(vocab: int, top_p: float) -> None:
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 0.5
    probs = distribution(logits.clone(), [row(top_p=top_p)])[0]
    full = torch.softmax(logits[0].double(), -1)
    kept = expected_nucleus(full, top_p)
    assert set(probs.nonzero().flatten().tolist()) == kept
    assert torch.allclose(probs[list(kept)].double(), full[list(kept)] / full[list(kept)].sum(), atol=1e-6)


def test_top_k_beyond_the_sorted_candidates() -> None:
    logits = torch.randn(1, 2000, generator=torch.Generator().manual_seed(0))
    probs = distribution(logits.clone(), [row(top_k=700)])[0]
    assert set(probs.nonzero().flatten().tolist()) == set(torch.topk(logits[0], 700).indices.tolist())


@pytest.mark.parametrize("min_p", [0.01, 0.3, 1.0])
def test_min_p_drops_what_is_far_below_the_best(min_p: float) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(1))
    probs = distribution(logits.clone(), [row(min_p=min_p)])[0]
    full = torch.softmax(logits[0], -1)
    assert set(probs.nonzero().flatten().tolist()) == set((full >= min_p * full.max()).nonzero().flatten().tolist())


def test_top_p_applies_to_what_min_p_and_top_k_leave() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]]))
    kept = distribution(logits.clone(), [row(top_k=2, top_p=0.6)])[0]
    assert kept.nonzero().flatten().tolist() == [0, 1]  # 0.4 / 0.7 is below 0.6, so a second one is needed
    kept = distribution(logits.clone(), [row(min_p=0.7, top_p=0.5)])[0]
    assert kept.nonzero().flatten().tolist() == [0]  # of 0.4 and 0.3, the first alone has 0.57


def test_rows_do_not_disturb_each_other() -> None:
    logits = torch.randn(4, 500, generator=torch.Generator().manual_seed(2))
    rows = [
        row(temperature=0.0),
        row(temperature=0.7, seed=1),
        row(top_p=0.8, seed=2),
        row([1, 2, 2], 1, repetition_penalty=1.5, frequency_penalty=0.5, seed=3),
    ]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [r])[0] for i, r in enumerate(rows)]
    assert together == alone


def test_penalties_follow_their_formulas() -> None:
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 3.0])
    reshape(logits, row([0, 1, 2, 2, 2], 2, repetition_penalty=2.0))
    assert logits.tolist() == [1.0, -4.0, 0.5, 0.5, 3.0]  # prompt and output
    logits = torch.tensor([2.0, -2.0, 1.0, 0.5, 3.0])
    reshape(logits, row([0, 1, 2, 2, 2], 2, presence_penalty=0.5, frequency_penalty=0.25))
    assert logits.tolist() == [2.0, -2.0, 1.0 - 0.5 - 3 * 0.25, 0.5, 3.0]  # output only


def test_bias_bans_and_allowed_tokens() -> None:
    logits = torch.zeros(6)
    reshape(logits, row(logit_bias={1: 5.0, 4: -3.0, 99: 1.0}))
    assert logits.tolist() == [0.0, 5.0, 0.0, 0.0, -3.0, 0.0]
    logits = torch.zeros(6)
    reshape(logits, row(allowed_token_ids=(2, 3, 77)))
    assert logits.isfinite().nonzero().flatten().tolist() == [2, 3]
    logits = torch.zeros(6)
    reshape(logits, row(banned=(0, 5)))
    assert logits.isfinite().nonzero().flatten().tolist() == [1, 2, 3, 4]


def test_banning_all_allowed_tokens_leaves_the_allowed_ones() -> None:
    logits = torch.zeros(4)
    reshape(logits, row(allowed_token_ids=(2,), banned=(2,)))
    assert logits.isfinite().nonzero().flatten().tolist() == [2]


def test_draws_follow_the_distribution() -> None:
    probs = torch.tensor([0.05, 0.15, 0.0, 0.5, 0.3])
    n = 20_000
    counts = np.bincount(draw(probs.expand(n, -1), [uniform(7, i) for i in range(n)]), minlength=5)
    assert counts[2] == 0
    kept = [0, 1, 3, 4]
    chi2 = sum((counts[i] - n * float(probs[i])) ** 2 / (n * float(probs[i])) for i in kept)
    assert chi2 < 16.3  # 3 degrees of freedom, 0.1 %


def test_draws_at_the_ends_of_the_interval() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.5, 0.0]])
    assert draw(probs, [0.0]) == [1]
    assert draw(probs, [1.0 - 2**-53]) == [2]


def test_random_numbers_depend_on_seed_position_and_stream_only() -> None:
    assert uniform(3, 5) == uniform(3, 5)
    assert len({uniform(3, 5), uniform(4, 5), uniform(3, 6), uniform(3, 5, Stream.ACCEPT)}) == 4
    values = [uniform(1, i) for i in range(4000)]
    assert 0.0 <= min(values) <= max(values) < 1.0
    assert abs(np.mean(values) - 0.5) < 0.02
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


def test_logprobs_are_of_the_raw_logits_with_the_chosen_first() -> None:
    logits = torch.log(torch.tensor([[0.1, 0.6, 0.3]]))
    (got,) = top_logprobs(logits, [2], [2])
    assert got.token_ids == [2, 1, 2]
    assert got.rank == 2
    assert got.logprobs == pytest.approx([math.log(0.3), math.log(0.6), math.log(0.3)], abs=1e-6)
    (got,) = top_logprobs(logits, [1], [0])
    assert (got.token_ids, got.rank) == ([1], 1)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -1.0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-300),
        ("repetition_penalty", 1e308),
        ("max_tokens", -1),
        ("logprobs", -1),
        ("seed", 2**64),
        ("logit_bias", {1: math.nan}),
        ("allowed_token_ids", ()),
        ("stop", ("",)),
    ],
)
def test_bad_parameters_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams(**{field: value})


def test_a_mask_leaves_its_tokens_and_bans_yield_to_it() -> None:
    mask = torch.tensor([0b1010], dtype=torch.int32)  # ids 1 and 3

    def greedy(logits: list[float], **params: Any) -> int:
        banned = params.pop("banned", ())
        made = Row(SamplingParams(temperature=0.0, **params), 0, 3, np.array([7, 8, 9]), 1, banned, mask)
        return sample(torch.tensor([logits]), [made])[0]

    assert greedy([9.0, 1.0, 8.0, 2.0, 7.0]) == 3
    assert greedy([9.0, 1.0, 8.0, 2.0, 7.0] + [10.0] * 60) == 3  # beyond the mask nothing is allowed
    assert greedy([9.0, 1.0, 8.0, 2.0, 7.0], banned=(3,)) == 1
    assert greedy([9.0, 1.0, 8.0, 2.0, 7.0], banned=(1, 3)) == 3
    assert greedy([9.0, 1.0, 8.0, 2.0, 7.0], bad_word_ids=((3,),)) == 1
    assert greedy([9.0, 1.0, 8.0, 2.0, 7.0], logit_bias={0: 100.0}) == 3


def test_the_highest_bit_of_a_mask_counts() -> None:
    logits = torch.zeros(40)
    forbid(logits, torch.tensor([-(2**31), 0b10], dtype=torch.int32))
    assert torch.isfinite(logits).nonzero().flatten().tolist() == [31, 33]


def test_bad_words_are_banned_where_they_would_be_complete() -> None:
    words = ((4,), (8, 9, 5), (9, 6), (7, 8, 9, 3), (8, 2))
    made = row([7, 8, 9], prompt_len=1, bad_word_ids=words)
    assert endings(words, made) == [4, 5, 6]  # the fourth begins in the prompt, the fifth is not at the end
    logits = torch.zeros(10)
    reshape(logits, made)
    assert (logits == -torch.inf).nonzero().flatten().tolist() == [4, 5, 6]
    assert made.reshaped
