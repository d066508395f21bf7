"""A whole model as speculator, beside real tiny targets: the text is the target's; a twin's drafts are all kept."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.llm import LLM
from engine.speculation.lengths import Candidate, Lengths
from engine.testing.parity import Build, ParityBench, Traffic

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = ["model.dtype=float32", "kv_cache.page_size=8", "kv_cache.pages=128", "device.threads=1", "grammar=none"]
TRAFFIC = [Traffic(), Traffic(batch=4, preempt=True), Traffic(warm=True, batch=4)]


def options(target: Path, drafts: Path) -> list[str]:
    return [*BASE, f"model.source=path:{target}", f"speculator.options.source=path:{drafts}"]


@pytest.mark.parametrize(
    "build", [Build(speculator="draft_model"), Build(cache="paged", chunk=16, speculator="draft_model")]
)
def test_the_drafts_of_a_twin_are_all_kept(build: Build, served: Callable[[str], Any]) -> None:
    target = served("llama")
    with ParityBench(build, options(target.folder, target.folder)) as bench:
        for traffic in TRAFFIC:
            outcome = bench.run(traffic, [text.case for text in target.texts])
            assert not outcome.wrong, (traffic, outcome.wrong)
            assert outcome.drafted > 0
        counters = bench._llm.engine.drafter.counters
    assert counters.accepted == counters.drafted
    assert counters.accepted_at[3] > 10


def test_another_model_drafts_worse_and_changes_nothing(served: Callable[[str], Any]) -> None:
    target, other = served("llama"), served("deepseek-v3")
    with ParityBench(Build(speculator="draft_model"), options(target.folder, other.folder)) as bench:
        for traffic in TRAFFIC:
            outcome = bench.run(traffic, [text.case for text in target.texts])
            assert not outcome.wrong, (traffic, outcome.wrong)
        counters = bench._llm.engine.drafter.counters
    assert counters.faults == 0
    assert counters.accepted < counters.drafted


class Moody(Lengths):
    """Drafts now and then, of any length, for anybody; and watches requests when it feels like it."""

    def __init__(self) -> None:
        self._draw = random.Random(3)

    def due(self, able: Sequence[str], rows: int) -> bool:
        return bool(able) and self._draw.random() < 0.6

    def lengths(self, candidates: Sequence[Candidate], rows: int) -> list[int]:
        return [self._draw.randint(0, candidate.room) for candidate in candidates]

    def follows(self, request_id: str, fresh: bool) -> bool:
        return self._draw.random() < 0.8


@pytest.mark.parametrize("cache", ["radix", "paged"])
def test_whenever_it_drafts_and_whatever_it_missed(cache: str, served: Callable[[str], Any]) -> None:
    """A controller turns drafts on and off at any time, and leaves gaps in what the draft model has read."""
    target = served("llama")
    with ParityBench(
        Build(cache=cache, chunk=16, speculator="draft_model"), options(target.folder, target.folder)
    ) as bench:
        drafter = bench._llm.engine.drafter
        drafter.lengths = Moody()
        for traffic in TRAFFIC * 2:
            outcome = bench.run(traffic, [text.case for text in target.texts])
            assert not outcome.wrong, (traffic, outcome.wrong)
        assert drafter.counters.accepted > 50
        assert drafter.counters.faults == 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda text: text.replace("<end>", "<fin>"), "token 256 is '<fin>' to it and '<end>' to the model"),
        (lambda text: text.replace('"Ā":0,', "").replace('"Ā": 0,', ""), "a vocabulary of 256 tokens.*has 257"),
    ],
)
def test_another_vocabulary_is_refused_at_the_start(
    served: Callable[[str], Any], tmp_path: Path, change: Callable[[str], str], words: str
) -> None:
    target, other = served("llama").folder, tmp_path / "other"
    shutil.copytree(target, other)
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(change(tokenizer.read_text(encoding="utf-8")), encoding="utf-8")
    with pytest.raises(EngineError, match=f"the draft model path:.*{words}"):
        LLM(None, ["speculator.use=draft_model", *options(target, other)])


def test_a_model_that_is_not_there_ends_the_start_with_a_sentence(served: Callable[[str], Any]) -> None:
    with pytest.raises(EngineError, match="/nowhere"):
        LLM(None, ["speculator.use=draft_model", *options(served("llama").folder, Path("/nowhere"))])
