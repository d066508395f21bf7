"""The residents among the built-in speculators, held to the conformance suite."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.plugin import Options
from engine.plugins.speculators import draft_model, eagle
from engine.testing.parity import Build, ParityBench, Traffic
from engine.testing.speculator import SpeculatorConformance

pytestmark = pytest.mark.usefixtures("one_thread")


class TestDraftModel(SpeculatorConformance):
    """A twin of the target."""

    (offer,) = draft_model.speculators()
    module = "engine.plugins.speculators.draft_model"
    _source = "path:nowhere"

    def options(self) -> Options:
        return draft_model.DraftModelOptions(source=self._source)

    @pytest.fixture
    def target(self, served: Callable[[str], Any]) -> Path:
        folder: Path = served("llama").folder
        self._source = f"path:{folder}"
        return folder


class TestEagle(SpeculatorConformance):
    """A head of random weights that drafts chains."""

    (offer,) = eagle.speculators()
    module = "engine.plugins.speculators.eagle"
    _options: dict[str, Any] = {}

    def options(self) -> Options:
        return eagle.EagleOptions(**self._options)

    @pytest.fixture
    def target(self, served: Callable[[str], Any], make_head: Callable[..., tuple[Path, object]]) -> Path:
        folder: Path = served("llama").folder
        self._options = {"head": f"path:{make_head()[0]}"}
        return folder


class TestEagleTrees(TestEagle):
    """The same head, with trees."""

    @pytest.fixture
    def target(self, served: Callable[[str], Any], make_head: Callable[..., tuple[Path, object]]) -> Path:
        folder: Path = served("llama").folder
        self._options = {"head": f"path:{make_head()[0]}", "tree": {"top_k": 2, "depth": 3}}
        return folder


def test_a_twin_catches_up_on_kv_from_another_engine(served: Callable[[str], Any]) -> None:
    """Fetched pages hold no draft KV; who needs only tokens computes it, and then all drafts are accepted."""
    target = served("llama")
    base = ["model.dtype=float32", "kv_cache.page_size=8", "kv_cache.pages=128", "device.threads=1", "grammar=none"]
    drafts = ["speculator.use=draft_model", f"speculator.options.source=path:{target.folder}"]
    more = [f"model.source=path:{target.folder}", "speculator.controller=false", *drafts]
    with ParityBench(Build(speculator="draft_model", pair="local"), [*base, *more]) as bench:
        outcome = bench.run(Traffic(batch=4, preempt=True), [text.case for text in target.texts])
        counters = bench._llm.engine.drafter.counters
    assert not outcome.wrong
    assert outcome.fetched == len(target.texts)
    assert counters.accepted == counters.drafted > 20
