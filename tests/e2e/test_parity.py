"""Law 1 with real weights in float32: greedy tokens equal those of `transformers`, however they are computed.

A covering part of the combinations, on short prompts and one long one; `benchmarks/parity.py` runs all of them on all
prompts.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.testing.parity import Build, Case, ParityBench, Traffic

DATA = Path(__file__).parents[1] / "data"

BUILDS = [
    Build(cache="paged"),
    Build(cache="radix", chunk=64, speculator="ngram", pair="nccl"),
    Build(cache="radix", pair="local"),
    Build(cache="paged", chunk=64, speculator="ngram", pair="tcp", producer_page=32),
]
TRAFFIC = [
    Traffic(),
    Traffic(batch=16, preempt=True),
    Traffic(warm=True, batch=16),
    Traffic(warm=True, preempt=True),
]


def cases() -> list[Case]:
    """A prompt of each kind; a third of each text, for time."""
    prompts = json.loads((DATA / "parity.json").read_text())
    chosen = [p for p in prompts if p["id"] in {"chat-2", "code-2", "unicode-2", "long-1"}]
    return [Case(p["id"], p["prompt_token_ids"], p["fp32_token_ids"][:16]) for p in chosen]


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_greedy_tokens_equal_those_of_transformers(build: Build) -> None:
    with ParityBench(build) as bench:
        for traffic in TRAFFIC:
            outcome = bench.run(traffic, cases())
            assert not outcome.wrong, (traffic, outcome.wrong)
            assert (outcome.cached_tokens > 0) or not (traffic.warm or build.pair)
            assert (outcome.preemptions > 0) == traffic.preempt
            assert (outcome.drafted > 0) == (build.speculator == "ngram")
            assert (outcome.fetched == len(cases())) == bool(build.pair)
