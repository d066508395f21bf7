"""Latent attention through the whole engine: both caches, chunks, prefix hits, preemption, drafts and transfer."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.testing.parity import Build, Case, ParityBench, Traffic
from engine.testing.tokenizer import save_byte_tokenizer

BUILDS = [
    Build(cache="paged", chunk=16),
    Build(cache="radix", speculator="ngram"),
    Build(cache="radix", pair="local"),
    Build(cache="radix", pair="nccl", producer_page=16),
]
TRAFFIC = [Traffic(batch=4, preempt=True), Traffic(warm=True, batch=4)]


@pytest.fixture(scope="module")
def served(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Case]]:
    """A tiny DeepSeek-V3 with a tokenizer, and what transformers writes after four prompts."""
    folder = tmp_path_factory.mktemp("served") / "model"
    shutil.copytree(tiny("deepseek-v3"), folder)
    save_byte_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    draw = random.Random(3)
    prompts = [[draw.randrange(160) for _ in range(length)] for length in (5, 17, 33, 60)]
    return folder, [Case(str(len(prompt)), prompt, _greedy(model, prompt, 12)) for prompt in prompts]


@torch.inference_mode()
def _greedy(model: torch.nn.Module, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_greedy_tokens_equal_those_of_transformers(served: tuple[Path, list[Case]], build: Build) -> None:
    folder, cases = served
    pages = ["kv_cache.page_size=8", "kv_cache.pages=128", "device.threads=1", "grammar=none"]
    with ParityBench(build, [f"model.source=path:{folder}", "model.dtype=float32", *pages]) as bench:
        for traffic in TRAFFIC:
            outcome = bench.run(traffic, cases)
            assert not outcome.wrong, (traffic, outcome.wrong)
            assert (outcome.cached_tokens > 0) or not (traffic.warm or build.pair)
            assert (outcome.preemptions > 0) == traffic.preempt
            assert (outcome.fetched == len(cases)) == bool(build.pair)


def test_8_bit_rows_give_the_same_tokens_in_any_composition(served: tuple[Path, list[Case]]) -> None:
    """What is new is read from the cache as well, so neither chunks nor prefix hits change what a prompt sees."""
    folder, cases = served
    pages = ["kv_cache.dtype=fp8", "kv_cache.page_size=8", "kv_cache.pages=128", "device.threads=1", "grammar=none"]
    base = [f"model.source=path:{folder}", "model.dtype=float32", *pages]
    with ParityBench(Build(cache="paged"), base) as bench:
        plain = [Case(case.name, case.prompt, got[0]) for case in cases for got in bench._generate([case], False)]
    assert [case.expected for case in plain] != [case.expected for case in cases], "8 bits are no rounding at all"
    with ParityBench(Build(cache="radix", chunk=16), base) as bench:
        for traffic in TRAFFIC:
            assert not bench.run(traffic, plain).wrong
