"""A head's files and mathematics: what is served computes what the differentiable module computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.reference import TorchOps
from engine.plugins.quantization.none.linear import DenseQuantization
from engine.plugins.speculators.eagle.files import HeadWeights, head_config, weight_file
from engine.plugins.speculators.eagle.head import Head, load
from engine.plugins.speculators.eagle.module import EagleModule, Unrolled
from engine.plugins.speculators.eagle.shape import read_shape, tensors
from engine.plugins.speculators.eagle.shipped import HEADS, shipped_head
from engine.specs.model import ModelProfile
from engine.testing.speculator import PROFILE as TOY

MakeHead = Callable[..., tuple[Path, EagleModule]]

pytestmark = pytest.mark.usefixtures("one_thread")

VARIANTS: dict[str, dict[str, Any]] = {
    "3.0": {},
    "3.1": {"fc_norm": True, "norm_output": True},
    "normed-residual": {"norm_before_residual": True, "norm_before_fc": True, "attention_bias": True},
    "whole-vocabulary": {"draft_vocab_size": 160},
    "two-states": {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2]}},
    "llama3-rope": {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
}


def opened(folder: Path, dtype: torch.dtype = torch.float32) -> Head:
    source = HeadWeights(weight_file(folder))
    shape = read_shape(head_config(folder))
    device = torch.device("cpu")
    return load(shape, source, DenseQuantization(dtype), TorchOps(), max_positions=256, device=device, dtype=dtype)


class Cache:
    """Keys and values of one chain; a query sees all that came before it, as a draft's pages would show it."""

    def __init__(self) -> None:
        self.k, self.v = torch.empty(0), torch.empty(0)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k, self.v = torch.cat((self.k, k)), torch.cat((self.v, v))
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1).transpose(0, 1) for x in (self.k, self.v))
        mask = torch.ones(len(q), len(self.k), dtype=torch.bool).tril(len(self.k) - len(q))
        mixed = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), keys, values, attn_mask=mask)
        return mixed.transpose(0, 1)


@torch.inference_mode()
def chains(module: EagleModule, features: Tensor, embeddings: Tensor, steps: int) -> list[Tensor]:
    """What the module says at the last position after each step, [hidden] each; step i is fed embedding T - 1 + i."""
    length = len(features)
    attend, states, outs = Unrolled(module.shape.window), module.fuse(features[None]), []
    for i in range(steps):
        positions = torch.arange(length)[None] + i
        states, out = module(embeddings[i : i + length][None], states, positions, attend)
        outs.append(out[0, -1])
    return outs


@pytest.mark.parametrize("variant", VARIANTS)
@torch.inference_mode()
def test_the_served_head_computes_what_the_module_computes(variant: str, make_head: MakeHead) -> None:
    folder, module = make_head(**VARIANTS[variant])
    head, length, steps = opened(folder), 9, 4
    features, embeddings = torch.randn(length, module.shape.taps, 64), torch.randn(length + steps, 64)
    expected = chains(module, features, embeddings, steps)
    attend = Cache()
    states, out = head.step(embeddings[:length], head.fuse(features), torch.arange(length), attend)
    for i in range(steps):
        assert head.lm_head is not None
        logits = head.lm_head(out[-1:])
        torch.testing.assert_close(out[-1], expected[i], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(logits[0], module.logits(expected[i]), atol=1e-4, rtol=1e-4)
        at = length + i
        states, out = head.step(embeddings[at : at + 1], states[-1:].clone(), torch.tensor([at]), attend)
    best = torch.arange(module.shape.draft_vocab)
    if head.target_ids is not None:
        assert torch.equal(head.target_ids, module.target_ids(best))
        assert module.t2d[head.target_ids].all()
        assert int(module.t2d.sum()) == len(best)


@torch.inference_mode()
def test_an_eagle_1_head_fuses_embedding_and_state_and_has_no_output_layer(make_head: MakeHead) -> None:
    folder, module = make_head("eagle")
    head, length = opened(folder), 7
    features, embeddings = torch.randn(length, 1, 64), torch.randn(length + 2, 64)
    expected, attend = chains(module, features, embeddings, 2), Cache()
    states, out = head.step(embeddings[:length], head.fuse(features), torch.arange(length), attend)
    torch.testing.assert_close(out[-1], expected[0], atol=1e-5, rtol=1e-4)
    _, out = head.step(embeddings[length : length + 1], states[-1:].clone(), torch.tensor([length]), attend)
    torch.testing.assert_close(out[-1], expected[1], atol=1e-5, rtol=1e-4)
    assert head.lm_head is None


def test_other_spellings_of_the_names_are_read(make_head: MakeHead) -> None:
    def renamed(stored: dict[str, Tensor]) -> None:
        for name in [name for name in stored if name.startswith("midlayer.")]:
            stored["layers.0." + name.removeprefix("midlayer.")] = stored.pop(name)
        for tap, word in enumerate(("low", "mid", "high")):
            stored[f"aux_norm_{word}.weight"] = stored.pop(f"fc_norm.{tap}.weight")
        stored["verifier_norm.weight"] = torch.ones(64)

    folder, module = make_head(change=renamed, fc_norm=True)
    source = HeadWeights(weight_file(folder))
    source.expect(tensors(module.shape))
    assert torch.equal(source.get("midlayer.hidden_norm.weight", torch.float32), module.midlayer.hidden_norm.weight)


def test_the_speculators_spelling_of_a_config_names_layers_by_what_enters_them(make_head: MakeHead) -> None:
    folder, module = make_head()
    config = json.loads((folder / "config.json").read_text())
    layer = {name: config[name] for name in ("hidden_size", "intermediate_size", "vocab_size", "rms_norm_eps")}
    layer |= {name: config[name] for name in ("num_attention_heads", "num_key_value_heads", "num_hidden_layers")}
    other = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": 128},
        "draft_vocab_size": 96,
        "target_hidden_size": None,
        "norm_before_residual": False,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    }
    assert read_shape(other) == module.shape
    assert module.shape.hidden_layers(3) == (1, 2, 3)


def test_the_usual_layers_are_those_of_the_authors(make_head: MakeHead) -> None:
    _, module = make_head(eagle_config=None)
    assert module.shape.hidden_layers(32) == (2, 16, 29)
    assert module.shape.hidden_layers(61) == (2, 30, 58)


@torch.inference_mode()
def test_rows_of_int8_are_read_with_their_scales(make_head: MakeHead) -> None:
    def narrowed(stored: dict[str, Tensor]) -> None:
        weight = stored["lm_head.weight"]
        scale = weight.abs().amax(1) / 127
        stored["lm_head.weight"] = (weight / scale[:, None]).round().to(torch.int8)
        stored["lm_head.weight_scale"] = scale.half()

    folder, module = make_head(change=narrowed)
    source = HeadWeights(weight_file(folder))
    weight, blocks = source.get("lm_head.weight", torch.float32), source.blocks("lm_head.weight")
    torch.testing.assert_close(weight, module.lm_head.weight, atol=5e-3, rtol=0)
    assert blocks is not None
    assert source.blocks("fc.weight") is None
    assert torch.equal((blocks.codes.float() * blocks.scale.float()[..., None]).flatten(1), weight)
    opened(folder)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__delitem__(name)


def with_tensor(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__setitem__(name, value)


FAULTS: dict[str, tuple[Callable[[dict[str, Tensor]], None], dict[str, Any], str]] = {
    "missing": (without("midlayer.self_attn.k_proj.weight"), {}, "lacks tensor midlayer.self_attn.k_proj.weight"),
    "misshapen": (
        with_tensor("fc.weight", torch.zeros(64, 128)),
        {},
        r"tensor fc.weight has shape \[64, 128\], the config asks for \[64, 192\]",
    ),
    "no map": (without("d2t"), {}, "lacks tensor d2t"),
    "map out of range": (with_tensor("d2t", torch.full((96,), 100)), {}, "d2t leads to token 195, outside"),
    "map below zero": (with_tensor("d2t", torch.full((96,), -3)), {}, "d2t leads to token -3, outside"),
    "map not injective": (with_tensor("d2t", -torch.arange(96)), {}, "from two draft ids to one token"),
    "not finite": (with_tensor("norm.weight", torch.full((64,), torch.nan)), {}, "norm.weight has values that are not"),
    "narrower": (lambda stored: None, {"target_hidden_size": 128}, "lacks tensor embed_tokens.weight"),
    "own embedding": (
        with_tensor("embed_tokens.weight", torch.zeros(150, 64)),
        {},
        r"embed_tokens.weight has shape \[150, 64\]",
    ),
    "scales": (
        lambda stored: stored.update(
            {"fc.weight": torch.zeros(64, 192, dtype=torch.int8), "fc.weight_scale": torch.ones(3)}
        ),
        {},
        "fc.weight_scale must hold 64",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_refused_with_the_tensors_name(fault: str, make_head: MakeHead) -> None:
    change, more, told = FAULTS[fault]
    folder, _ = make_head(change=change)
    config = json.loads((folder / "config.json").read_text()) | more
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=told):
        opened(folder)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("hidden_size", None, "hidden_size is missing"),
        ("num_key_value_heads", 3, "not a multiple"),
        ("num_hidden_layers", 2, "num_hidden_layers is 2"),
        ("hidden_act", "gelu", "hidden_act 'gelu'"),
        ("draft_vocab_size", 0, "draft_vocab_size must be a positive integer"),
        ("eagle_aux_hidden_state_layer_ids", ["x"], "must be a list of layers"),
        ("eagle_aux_hidden_state_layer_ids", [3, 1, 2], "in ascending order"),
        ("quantization_config", {"quant_method": "awq"}, "quantization_config"),
        ("num_attention_heads", True, "num_attention_heads must be a positive integer"),
        ("architectures", 5, "architectures must be a list of names"),
        ("layer_types", 5, "layer_types must be a list of kinds"),
        ("rms_norm_eps", "x", "rms_norm_eps must be a number"),
    ],
)
def test_a_config_that_asks_for_other_mathematics_is_refused(
    field: str, value: Any, told: str, make_head: MakeHead
) -> None:
    folder, _ = make_head(eagle_config=None)
    with pytest.raises(ValueError, match=told):
        read_shape(json.loads((folder / "config.json").read_text()) | {field: value})


def test_layers_that_the_target_lacks_are_named(make_head: MakeHead) -> None:
    _, module = make_head(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 29, 57]})
    with pytest.raises(ValueError, match="layers 2, 30, 58 of its target, which has 3 layers"):
        module.shape.hidden_layers(3)


@pytest.mark.parametrize("folder", [path.parent for path in HEADS.glob("*/config.json")], ids=lambda path: path.name)
def test_a_shipped_head_is_whole(folder: Path) -> None:
    head = opened(folder, torch.bfloat16)
    assert head.target_ids is not None
    assert len(head.target_ids) == head.shape.draft_vocab == 8192
    assert head.shape.hidden_layers(30) == (2, 15, 27)
    assert weight_file(folder).stat().st_size < 15_000_000


def test_one_head_is_shipped_for_the_embedded_model() -> None:
    smollm2 = {"architecture": "LlamaForCausalLM", "layers": 30, "hidden_size": 576, "vocab_size": 49152}
    toy = {name: getattr(TOY, name) for name in TOY.__dataclass_fields__}
    assert shipped_head(ModelProfile(**(toy | smollm2))) == HEADS / "smollm2-135m-instruct"


def test_a_pickled_head_is_never_read(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pickled weights only \(pytorch_model.bin\)"):
        weight_file(tmp_path)
    (tmp_path / "pytorch_model.bin").unlink()
    with pytest.raises(ValueError, match="holds no weights"):
        weight_file(tmp_path)
    with pytest.raises(ValueError, match="no folder"):
        head_config(tmp_path / "nowhere")
