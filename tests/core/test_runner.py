"""The runner over a model that computes nothing but what a test wants to see sampled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.batch import Admission, Entry, StepBatch
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBackend, AttentionBatch, KVLayout
from engine.specs.model import Forward, Model

VOCAB = 8


class NoAttention(AttentionBackend):
    def kv_layout(self) -> KVLayout:
        return KVLayout(parts=(), dtype="float32")

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        return batch

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Any) -> Tensor:
        raise AssertionError("the model has no attention")


class Successor(Model):
    """Says that each token is followed by the next id; after token 5 its logits are not finite."""

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        return torch.nn.functional.one_hot((tokens + 1) % VOCAB, VOCAB).float()

    def logits(self, hidden: Tensor) -> Tensor:
        logits = hidden * 9
        logits[hidden[:, 6] > 0] = torch.nan
        return logits

    def weight_bytes(self) -> int:
        return 0


def entry(slot: int, count: int) -> Entry:
    return Entry(slot=slot, start=0, count=count, samples=True, first_page=0, new_pages=[slot])


def admission(slot: int, tokens: list[int], **params: Any) -> Admission:
    chosen = SamplingParams(temperature=0.0, **params)
    return Admission(slot=slot, tokens=tokens, prompt_len=len(tokens), params=chosen, seed=0, stop_ids=())


@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_a_row_that_is_not_finite_fails_alone(logprobs: int | None) -> None:
    runner = Runner(Successor(), NoAttention(), [], page_size=4, slots=3, max_len=4, device=torch.device("cpu"))
    prompts = [[1, 2], [4, 5], [3, 6]]
    batch = StepBatch(
        number=1,
        admissions=[admission(slot, tokens, logprobs=logprobs) for slot, tokens in enumerate(prompts)],
        entries=[entry(slot, 2) for slot in range(3)],
    )
    first, broken, last = runner.step(batch).entries
    assert (first.failed, broken.failed, last.failed) == (False, True, False)
    assert (first.tokens, broken.tokens, last.tokens) == ([3], [], [7])
    if logprobs is not None:
        assert first.logprobs is not None
        assert len(first.logprobs[0].token_ids) == 1 + logprobs


class Keeping(Successor):
    """Drops the rows that nobody wants; remembers how many were left."""

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        left = step.keep(super().forward(tokens, positions, step))
        self.left = len(left)
        return left


@pytest.mark.parametrize(("asked", "left"), [(None, 1 + 3 + 1), (0, 300 + 12 + 5)], ids=["dropped", "logprobs"])
def test_rows_that_nobody_samples_from_are_dropped(asked: int | None, left: int) -> None:
    """The last rows of each prompt and its drafts stay, and are sampled as if all had stayed."""
    texts = [[i % 5 for i in range(300)], [2, 3] * 5 + [4, 1], [1, 2, 3, 4, 3]]
    entries = [
        Entry(slot=0, start=0, count=300, samples=False, first_page=0, new_pages=[0], prompt_logprobs=asked),
        Entry(slot=1, start=0, count=12, samples=True, first_page=0, new_pages=[1], drafts=[4, 1]),
        Entry(slot=2, start=0, count=5, samples=True, first_page=0, new_pages=[2]),
    ]
    found = []
    for model in (Successor(), Keeping()):
        runner = Runner(model, NoAttention(), [], page_size=400, slots=3, max_len=400, device=torch.device("cpu"))
        admissions = [admission(slot, tokens) for slot, tokens in enumerate(texts)]
        found.append(
            [one.tokens for one in runner.step(StepBatch(number=1, admissions=admissions, entries=entries)).entries]
        )
    assert found[0] == found[1] == [[], [4, 5], [4]]
    assert isinstance(model, Keeping)
    assert model.left == left
