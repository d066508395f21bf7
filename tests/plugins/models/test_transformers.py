"""The fallback: decoders of the transformers library against themselves, and what it refuses."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, dynamic_module_utils

from engine.plugins.models import transformers as fallback
from engine.plugins.quantization import none
from engine.plugins.weight_loaders.dummy.loader import DummyLoader
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.testing.model import ModelConformance, build_model, run

(OFFER,) = fallback.models()
(LINEARS,) = none.quantizations()
TEXT = [(37 * i * i + 11 * i) % 160 for i in range(40)]


def load(folder: Path, **changes: Any) -> Any:
    loader = SafetensorsLoader()
    config = loader.config(folder) | changes
    return build_model(OFFER, LINEARS, config, loader.open(folder, config))


class TestTransformers(ModelConformance):
    offer = OFFER
    module = "engine.plugins.models.transformers"
    linears = LINEARS

    @pytest.fixture
    def checkpoint(self, tiny: Callable[[str], Path]) -> Any:
        loader = SafetensorsLoader()
        config = loader.config(tiny("gemma2"))
        return config, loader.open(tiny("gemma2"), config)


@pytest.mark.parametrize(
    "name", ["gemma2", "gpt-neox", "phi", "phi3", "olmo2", "gpt2", "qwen3-moe", "qwen2-windows", "mistral"]
)
@torch.inference_mode()
def test_logits_equal_transformers(tiny: Callable[[str], Path], name: str) -> None:
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32, attn_implementation="eager")
    expected = theirs(torch.tensor([TEXT])).logits[0]
    assert expected.std() > 0.2, "flat logits would prove nothing"
    torch.testing.assert_close(run(load(tiny(name)), [TEXT])[0], expected, rtol=0, atol=1e-4)


def test_two_models_keep_apart(tiny: Callable[[str], Path]) -> None:
    first, second = load(tiny("gpt-neox")), load(tiny("olmo2"))
    alone = run(load(tiny("gpt-neox")), [TEXT])[0]
    run(second, [TEXT])
    assert torch.equal(run(first, [TEXT])[0], alone)


def test_random_weights_need_no_checkpoint(tiny: Callable[[str], Path]) -> None:
    loader = DummyLoader()
    config = loader.config(tiny("olmo2"))
    model = build_model(OFFER, LINEARS, config, loader.open(tiny("olmo2"), config))
    assert run(model, [TEXT])[0].isfinite().all()


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_own_code_of_a_checkpoint_runs_only_when_allowed(
    tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = tmp_path / "own"
    shutil.copytree(tiny("llama"), folder)
    (folder / "own.py").write_text(OWN_CODE)
    config = json.loads((folder / "config.json").read_text()) | {
        "architectures": ["OwnForCausalLM"],
        "model_type": "own",
        "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnForCausalLM"},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="set trust_remote_code"):
        load(folder)
    allowed = replace(OFFER, build=partial(_trusting, OFFER.build))
    loader = SafetensorsLoader()
    model = build_model(allowed, LINEARS, loader.config(folder), loader.open(folder, {}))
    torch.testing.assert_close(run(model, [TEXT])[0], run(load(tiny("llama")), [TEXT])[0], rtol=0, atol=1e-5)


def _trusting(build: Callable[..., Any], options: Any, **arguments: Any) -> Any:
    return build(type(options)(trust_remote_code=True), **arguments)


@pytest.mark.parametrize(("name", "words"), [("stablelm", "attention interface"), ("mamba", "num_attention_heads")])
def test_other_architectures_are_refused(tiny: Callable[[str], Path], name: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load(tiny(name))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": 16}, "kv_lora_rank: latent attention"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "'gptq'"),
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be a positive integer, not -1"),
        ({"hidden_size": "64"}, "hidden_size must be a positive integer, not '64'"),
        ({"num_key_value_heads": 3}, "is not a multiple of num_key_value_heads 3"),
        ({"auto_map": {"AutoConfig": "x.Y"}}, "set trust_remote_code"),
        ({"model_type": "no-such"}, "model_type 'no-such' is unknown"),
        ({"query_pre_attn_scalar": 24, "attention_multiplier": 0.5}, "layer 0 its scale is 0.204124"),
        ({"layer_types": None, "sliding_window_pattern": 3}, "layer 1 its window is None, the engine would use 12"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(
    tiny: Callable[[str], Path], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        load(tiny("gemma2"), **changes)
