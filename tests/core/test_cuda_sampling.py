"""Sampling on the device against the sampler of the host: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from engine.randomness import uniform
from engine.sampler import Row
from engine.sampler import sample as host_sample
from engine.sampling_params import SamplingParams

pytest.importorskip("triton")

from engine.cuda.inputs import sampling_fields
from engine.cuda.prepare import ROW, SAMPLES
from engine.cuda.sampling import BAD, UNSAMPLED, sample

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "cold": {"temperature": 0.3},
    "no temperature at all": {"temperature": 1e-30},
    "top-k": {"top_k": 5},
    "top-k of one": {"top_k": 1},
    "top-p": {"top_p": 0.6},
    "tiny top-p": {"top_p": 1e-6},
    "min-p": {"min_p": 0.2},
    "all": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.01},
}


def device_sample(logits: torch.Tensor, rows: list[Row]) -> list[int]:
    packed = np.zeros((len(rows), ROW), dtype=np.int32)
    for at, row in enumerate(rows):
        packed[at, 0] = at
        packed[at, SAMPLES:] = sampling_fields(row.params, row.seed, row.position)
    last = torch.full((len(rows),), -7, dtype=torch.int32, device=DEVICE)
    sampled = torch.zeros(len(rows), dtype=torch.int32, device=DEVICE)
    sample(logits.to(DEVICE), torch.from_numpy(packed).to(DEVICE), last, sampled)
    kept = sampled >= 0
    assert torch.equal(last[kept], sampled[kept])
    assert bool((last[~kept] == -7).all()), "a token that is none became the input of the next step"
    found: list[int] = sampled.tolist()
    return found


def row(position: int, **params: Any) -> Row:
    return Row(SamplingParams(**params), 11, position, np.zeros(1, dtype=np.int64), 1)


@pytest.mark.parametrize("name", CASES)
def test_equals_the_host(name: str) -> None:
    logits = torch.randn(3, 250, generator=torch.Generator().manual_seed(3)) * 3
    rows = [row(position, **CASES[name]) for position in range(3)]
    assert device_sample(logits, rows) == host_sample(logits.clone(), rows)


def test_logits_of_another_dtype_are_converted() -> None:
    logits = (torch.randn(2, 250, generator=torch.Generator().manual_seed(4)) * 3).bfloat16()
    rows = [row(1, temperature=0.0), row(2, top_k=20, top_p=0.9)]
    assert device_sample(logits, rows) == host_sample(logits.float(), rows)


def test_a_vocabulary_of_several_chunks() -> None:
    logits = torch.randn(2, 9000, generator=torch.Generator().manual_seed(3)) * 2
    rows = [row(4, temperature=0.0), row(9, top_p=0.9)]
    assert device_sample(logits, rows) == host_sample(logits.clone(), rows)


def test_equal_logits_are_kept_in_order_up_to_the_limit() -> None:
    logits = torch.zeros(12, 64)
    logits[:, 7] = 1.0
    drawn = device_sample(logits, [row(position, top_k=3) for position in range(12)])
    assert set(drawn) == {0, 1, 7}
    assert device_sample(torch.zeros(1, 64), [row(0, temperature=0.0)]) == [0]
    nucleus = device_sample(torch.zeros(16, 64), [row(position, top_p=4 / 64) for position in range(16)])
    assert set(nucleus) == {0, 1, 2, 3}


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_fails_alone(value: float) -> None:
    logits = torch.zeros(3, 64)
    logits[:, 5] = 1.0
    logits[1, 60] = value
    assert device_sample(logits, [row(0, temperature=0.0) for _ in range(3)]) == [5, BAD, 5]


def test_rows_that_do_not_sample() -> None:
    packed = np.zeros((2, ROW), dtype=np.int32)
    packed[1, 0] = -1
    sampled = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    sample(torch.zeros(2, 64, device=DEVICE), torch.from_numpy(packed).to(DEVICE), sampled.clone(), sampled)
    assert sampled.tolist() == [UNSAMPLED, UNSAMPLED]


def test_the_uniform_number_keeps_its_bits() -> None:
    fields = np.array(sampling_fields(SamplingParams(), 5, 9), dtype=np.int32)
    halves = fields[5:7].view(np.float32).astype(np.float64)
    assert abs(halves.sum() - uniform(5, 9)) < 2**-47
