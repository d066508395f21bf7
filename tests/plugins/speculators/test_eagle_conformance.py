"""EAGLE heads in the kit's suite for speculators: chains and trees beside a tiny random target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.plugins.speculators import eagle
from engine.plugins.speculators.eagle import EagleOptions, TreeOptions
from engine.testing.speculator import SpeculatorConformance


class TestEagle(SpeculatorConformance):
    (offer,) = eagle.speculators()
    module = "engine.plugins.speculators.eagle"

    @pytest.fixture(autouse=True)
    def _head(self, target: Path, make_head: Callable[..., Any]) -> None:
        """A random head for the suite's target."""
        model = json.loads((target / "config.json").read_text())
        last = model["num_hidden_layers"] - 1
        self.folder, _ = make_head(
            hidden_size=model["hidden_size"],
            vocab_size=model["vocab_size"],
            draft_vocab_size=model["vocab_size"] // 2,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [last - 1, last]},
        )

    def options(self) -> EagleOptions:
        return EagleOptions(head=f"path:{self.folder}")


class TestEagleWithTrees(TestEagle):
    def options(self) -> EagleOptions:
        return EagleOptions(head=f"path:{self.folder}", tree=TreeOptions(top_k=2, depth=3))
