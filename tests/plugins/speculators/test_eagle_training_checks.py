"""What is wrong with a training file is told before any text is written."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from pydantic import ValidationError

from engine.errors import ConfigError
from engine.plugin import KVKind
from engine.plugins.speculators.eagle.training.checks import check
from engine.plugins.speculators.eagle.training.config import TrainConfig
from engine.plugins.speculators.eagle.training.target import Target

PROFILE = SimpleNamespace(
    architecture="LlamaForCausalLM",
    layers=5,
    hidden_size=32,
    vocab_size=260,
    max_context=256,
    kv_kind=KVKind.GQA,
    heads=2,
    kv_heads=1,
    head_dim=16,
)
TARGET = cast("Target", SimpleNamespace(profile=PROFILE, composition=SimpleNamespace(model_config={})))


def checked(**tree: Any) -> None:
    check(TrainConfig.model_validate({"heads": {"new": {}}, "training": {"contexts": [64, 256]}} | tree), TARGET)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"heads": {"odd": {"heads": 3, "kv_heads": 2}}}, "heads.odd: num_attention_heads 3 is not a multiple"),
        ({"heads": {"new": {"start": "gone"}}}, "heads.new.start: .* holds no weights"),
        ({"layers": [1, 3, 9]}, "heads.new: the head wants the states that enter layers 1, 3, 9"),
        ({"training": {"contexts": [300]}}, "the target's context is 256"),
        ({"evaluation": {"prompts": "gone"}}, "evaluation.prompts: .* must hold JSON lines"),
        ({"evaluation": {"prompts": "none.jsonl", "filler": ["gone/*"]}}, "evaluation.filler: no file matches gone"),
    ],
)
def test_what_would_end_a_run_late_is_refused_at_once(
    tree: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("none.jsonl").write_text("")
    checked()
    with pytest.raises(ConfigError, match=words):
        checked(**tree)


@pytest.mark.parametrize("name", ["../x", "..", "a/b", "", ".hidden"])
def test_a_head_is_named_by_a_folder_of_the_output(name: str) -> None:
    with pytest.raises(ValidationError, match="should match pattern"):
        checked(heads={name: {}})
    checked(heads={"smollm2-135m.v2": {}})
