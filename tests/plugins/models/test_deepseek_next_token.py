"""The layer that looks a token further ahead, against its formula in plain torch, dense and in FP8 blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.plugins.models import deepseek
from engine.plugins.quantization import none
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.specs.model import Model
from engine.testing.model import DenseForward, build_model

(OFFER,) = deepseek.models()
(LINEARS,) = none.quantizations()
TEXT = [(37 * i * i + 11 * i) % 160 for i in range(24)]


@pytest.fixture(scope="module")
def folder(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny DeepSeek-V3 whose layer 3 is a copy of its layer 2, with the norms and the matrix of a next layer."""
    made, old = tmp_path_factory.mktemp("next"), tiny("deepseek-v3")
    weights = load_file(old / "model.safetensors")
    for name in [name for name in weights if name.startswith("model.layers.2.")]:
        weights[name.replace("layers.2.", "layers.3.")] = weights[name].clone()
    random = torch.Generator().manual_seed(1)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"model.layers.3.{norm}.weight"] = 1 + 0.2 * torch.randn(64, generator=random)
    weights["model.layers.3.eh_proj.weight"] = 0.15 * torch.randn(64, 128, generator=random)
    save_file(weights, made / "model.safetensors")
    config = json.loads((old / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (made / "config.json").write_text(json.dumps(config))
    return made


def load(folder: Path, **changes: Any) -> tuple[Model, Any]:
    loader = SafetensorsLoader()
    config = loader.config(folder) | changes
    return build_model(OFFER, LINEARS, config, loader.open(folder, config)), loader.open(folder, config)


def linears() -> Any:
    return LINEARS.build(LINEARS.options(), device=None, dtype=torch.float32)


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@torch.inference_mode()
def test_states_equal_the_formula(folder: Path) -> None:
    """transformers' own layer 2 does for layer 3, fed with what the formula joins."""
    model, source = load(folder)
    (module,) = model.next_modules(source, linears())
    positions, step = torch.arange(len(TEXT) - 1), DenseForward(model.profile, [len(TEXT)])
    hidden = model.forward(torch.tensor(TEXT), torch.arange(len(TEXT)), step)
    step = DenseForward(model.profile, [len(TEXT) - 1])
    got = module(hidden[:-1], model.embed(torch.tensor(TEXT[1:])), positions, step)

    theirs: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").model
    weights = {k.removeprefix("model.layers.3."): v for k, v in load_file(folder / "model.safetensors").items()}
    states = theirs(torch.tensor([TEXT])).last_hidden_state[:, :-1]
    embedded = theirs.embed_tokens(torch.tensor([TEXT[1:]]))
    both = normed(embedded, weights["enorm.weight"]), normed(states, weights["hnorm.weight"])
    joined = torch.cat(both, -1) @ weights["eh_proj.weight"].T
    mask = torch.full((1, 1, len(positions), len(positions)), -torch.inf).triu(1)
    turned = theirs.rotary_emb(joined, positions[None])
    made = theirs.layers[2](joined, attention_mask=mask, position_embeddings=turned, position_ids=positions[None])
    want = normed(made[0] if isinstance(made, tuple) else made, weights["shared_head.norm.weight"])
    torch.testing.assert_close(got, want.view(-1, 64), rtol=0, atol=1e-4)
    assert module.weight_bytes() > 4 * 64 * 128


def test_a_missing_part_is_named(folder: Path, tmp_path: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.3.hnorm.weight"]
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    model, source = load(tmp_path)  # the model itself does not need it
    with pytest.raises(ValueError, match=r"lacks tensor model\.layers\.3\.hnorm\.weight"):
        model.next_modules(source, linears())


def test_a_model_without_such_layers_has_none(tiny: Callable[[str], Path]) -> None:
    model, source = load(tiny("deepseek-v3"), num_nextn_predict_layers=0)
    assert list(model.next_modules(source, linears())) == []
