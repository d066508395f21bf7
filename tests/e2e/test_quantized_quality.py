"""The default model's own blocks, multiplied with rounded inputs, say the same of a text as exact products do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.device import detect
from engine.llm import LLM
from engine.ops.kernels import QUANT_FEATURES, missing
from engine.testing.perplexity import perplexity

DATA = Path(__file__).parents[1] / "data"
LACKING = missing(detect("cpu"), QUANT_FEATURES)
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


def measured(*settings: str) -> tuple[float, str]:
    """Perplexity on one long and some short texts, and the quantization that was taken."""
    prompts = json.loads((DATA / "parity.json").read_text())
    chosen = [p["prompt_token_ids"] for p in prompts if p["id"] in {"chat-5", "code-6", "unicode-5", "long-1"}]
    with LLM(None, ["model.dtype=bfloat16", *settings]) as llm:
        return perplexity(llm.engine, chosen), llm.composition.choices["quantization"].name


def test_perplexity_of_blocks_is_within_one_percent_of_bfloat16() -> None:
    (exact, default), (found, taken) = measured(), measured("quantization=blocks")
    assert (default, taken) == ("packed", "blocks"), "what auto takes rounds nothing"
    assert found == pytest.approx(exact, rel=0.01)
    assert found != exact
