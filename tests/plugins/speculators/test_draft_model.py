"""A whole model as speculator, beside real tiny targets: the text is the target's; a twin's drafts are all kept."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineError
from engine.llm import LLM
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
