"""The Llama family against transformers, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.ops.reference import TorchOps
from engine.plugins.models import llama
from engine.plugins.models.llama.shape import FAMILIES, read_profile, read_shape, tensors
from engine.plugins.quantization import none
from engine.plugins.quantization.none.linear import DenseQuantization
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.testing.model import ModelConformance, build_model, run

(OFFER,) = llama.models()
(LINEARS,) = none.quantizations()
TEXT = [(37 * i * i + 11 * i) % 160 for i in range(40)]

MEMBERS = [
    "llama",
    "llama-tied",
    "llama-biased",
    "llama-linear",
    "llama-dynamic",
    "llama-llama3",
    "llama-yarn",
    "llama-yarn-scaled",
    "llama-longrope",
    "mistral",
    "mistral-unlimited",
    "qwen2",
    "qwen2-windows",
    "qwen3",
    "qwen3-biased",
    "qwen3-moe",
    "qwen3-moe-mixed",
]


def load(folder: Path, **changes: Any) -> Any:
    loader = SafetensorsLoader()
    config = loader.config(folder) | changes
    return build_model(OFFER, LINEARS, config, loader.open(folder, config))


@torch.inference_mode()
def reference(folder: Path, text: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([text])).logits[0]


class TestLlama(ModelConformance):
    offer = OFFER
    module = "engine.plugins.models.llama"
    linears = LINEARS

    @pytest.fixture
    def checkpoint(self, tiny: Callable[[str], Path]) -> Any:
        loader = SafetensorsLoader()
        config = loader.config(tiny("qwen2-windows"))
        return config, loader.open(tiny("qwen2-windows"), config)


@pytest.mark.parametrize("name", MEMBERS)
def test_logits_equal_transformers(tiny: Callable[[str], Path], name: str) -> None:
    ours = run(load(tiny(name)), [TEXT])[0]
    theirs = reference(tiny(name), TEXT)
    assert theirs.std() > 0.5, "flat logits would prove nothing"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_longrope_serves_short_contexts_with_the_short_factors(tiny: Callable[[str], Path]) -> None:
    folder, loader = tiny("llama-longrope"), SafetensorsLoader()
    config = loader.config(folder)
    profile = replace(read_profile(config), max_context=32)
    model = llama.build(
        OFFER.options(),
        config=config,
        profile=profile,
        weights=loader.open(folder, config),
        linears=DenseQuantization(torch.float32),
        ops=TorchOps(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    torch.testing.assert_close(run(model, [TEXT[:30]])[0], reference(folder, TEXT[:30]), rtol=0, atol=1e-4)


def test_old_spelling_of_rope_means_the_same(tiny: Callable[[str], Path]) -> None:
    folder = tiny("llama-llama3")
    new = SafetensorsLoader().config(folder)["rope_parameters"]
    old = {key: value for key, value in new.items() if key != "rope_theta"}
    again = load(folder, rope_parameters=None, rope_scaling=old, rope_theta=new["rope_theta"])
    assert torch.equal(run(again, [TEXT])[0], run(load(folder), [TEXT])[0])


def test_tied_models_keep_one_embedding(tiny: Callable[[str], Path]) -> None:
    model = load(tiny("llama-tied"))
    assert model.weight_bytes() == 4 * model.profile.parameters


@pytest.mark.parametrize("name", ["llama", "llama-biased", "qwen2", "qwen3", "qwen3-moe-mixed"])
def test_tensors_are_those_of_the_checkpoint(tiny: Callable[[str], Path], name: str) -> None:
    loader = SafetensorsLoader()
    config = loader.config(tiny(name))
    source = loader.open(tiny(name), config)
    assert tensors(read_shape(config)) == {name: source.shape(name) for name in source.names()}


ROUTED = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}


def plain(**changes: Any) -> dict[str, Any]:
    """A config that is accepted, but for the changes."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 160,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM.*implemented are LlamaForCausalLM"),
        ({"architectures": ...}, "architectures is None"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config.*'awq'"),
        ({"hidden_size": ...}, "hidden_size is missing"),
        ({"vocab_size": "many"}, "vocab_size must be a positive integer, not 'many'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
        ({"rope_scaling": {"rope_type": "spiral"}}, "rope_scaling.rope_type 'spiral' is unknown"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8}}, "rope_parameters.low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}}, "mrope_section is not implemented"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "differs by layer type"),
        ({"rope_parameters": [1]}, "must be a mapping"),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1], "long_factor": [1] * 8}},
            "short_factor has 1 entries",
        ),
        (
            {
                "architectures": ["Qwen3ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["linear_attention"] * 2,
            },
            "layer_types names 'linear_attention'",
        ),
        (ROUTED | {"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than num_experts 4"),
        (ROUTED | {"num_experts": None}, "num_experts is missing"),
        (ROUTED | {"moe_intermediate_size": ...}, "moe_intermediate_size is missing"),
        ({"architectures": ["Qwen2ForCausalLM"], "layer_types": ["full_attention"]}, "layer_types has 1 entries"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_profile(plain(**changes))


def test_profile_says_what_the_engine_needs() -> None:
    profile = read_profile(plain(num_key_value_heads=2, eos_token_id=[2, 5], max_position_embeddings=512))
    assert (profile.heads, profile.kv_heads, profile.head_dim, profile.scale) == (4, 2, 16, 0.25)
    assert profile.eos_token_ids == (2, 5)
    assert profile.max_context == 512
    assert profile.kv_elements_per_token == 2 * 2 * 32
    assert read_profile(plain(eos_token_id=0)).eos_token_ids == (0,)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "linear", "factor": 4.0}, 512),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 32}, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 128),
    ],
)
def test_stretched_contexts(rope: dict[str, Any], limit: int) -> None:
    assert read_profile(plain(max_position_embeddings=128, rope_scaling=rope)).max_context == limit


def test_every_family_member_is_offered() -> None:
    assert OFFER.architectures == frozenset(FAMILIES)
    assert len(FAMILIES) == 5
