"""DeepSeek against transformers: latent attention and routed experts, dense and in FP8 blocks, and what is refused."""

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

from engine.capabilities import KVKind
from engine.ops.experts import route
from engine.plugin import Offer
from engine.plugins.models import deepseek
from engine.plugins.models.deepseek.shape import FAMILIES, read_profile, read_shape, tensors
from engine.plugins.quantization import none
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.routing import Routing
from engine.testing.model import ModelConformance, build_model, run

(OFFER,) = deepseek.models()
(LINEARS,) = none.quantizations()
TEXT = [(37 * i * i + 11 * i) % 160 for i in range(40)]
MEMBERS = ["deepseek-v2", "deepseek-v2-groups", "deepseek-v3", "deepseek-v3-halves"]


def load(folder: Path, **changes: Any) -> Any:
    loader = SafetensorsLoader()
    config = loader.config(folder) | changes
    return build_model(OFFER, LINEARS, config, loader.open(folder, config))


@torch.inference_mode()
def reference(folder: Path, text: list[int]) -> Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    found: Tensor = model(torch.tensor([text])).logits[0]
    return found


class TestDeepseek(ModelConformance):
    offer = OFFER
    module = "engine.plugins.models.deepseek"
    linears = LINEARS

    @pytest.fixture
    def checkpoint(self, tiny: Callable[[str], Path]) -> Any:
        loader = SafetensorsLoader()
        config = loader.config(tiny("deepseek-v3"))
        return config, loader.open(tiny("deepseek-v3"), config)


@pytest.mark.parametrize("name", MEMBERS)
def test_logits_equal_transformers(tiny: Callable[[str], Path], name: str) -> None:
    ours = run(load(tiny(name)), [TEXT])[0]
    theirs = reference(tiny(name), TEXT)
    assert theirs.std() > 0.5, "flat logits would prove nothing"
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MEMBERS)
def test_tensors_are_those_of_the_checkpoint(tiny: Callable[[str], Path], name: str) -> None:
    loader = SafetensorsLoader()
    config = loader.config(tiny(name))
    source = loader.open(tiny(name), config)
    assert tensors(read_shape(config)) == {name: source.shape(name) for name in source.names()}


def rewritten(folder: Path, to: Path, change: Callable[[dict[str, Tensor]], None], **config: Any) -> Path:
    """A copy of a checkpoint with other weights and config."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, to / "model.safetensors")
    (to / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | config))
    return to


def correct(weights: dict[str, Tensor]) -> None:
    """Give every router a bias, negative for most experts."""
    for name, tensor in weights.items():
        if name.endswith("e_score_correction_bias"):
            tensor.copy_(torch.linspace(-3, 0.5, len(tensor)).roll(3))


def test_the_correction_of_a_choice_may_be_negative(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = rewritten(tiny("deepseek-v3"), tmp_path, correct)
    torch.testing.assert_close(run(load(folder), [TEXT])[0], reference(folder, TEXT), rtol=0, atol=1e-4)


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}


def in_blocks(weights: dict[str, Tensor]) -> None:
    """Store every projection in FP8 with a scale per block of 16 x 16, as DeepSeek-V3 does with 128."""
    for name in [n for n in weights if n.endswith(("_proj.weight", "_with_mqa.weight"))]:
        values = weights[name].float()
        rows, columns = (-(-size // 16) for size in values.shape)
        padded = torch.zeros(rows * 16, columns * 16)
        padded[: values.shape[0], : values.shape[1]] = values
        scales = padded.view(rows, 16, columns, 16).abs().amax((1, 3)).clamp_min(1e-12) / 448
        spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: values.shape[0], : values.shape[1]]
        weights[name] = (values / spread).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales


def dequantized(weights: dict[str, Tensor]) -> None:
    """The dense weights that the blocks of `in_blocks` stand for."""
    in_blocks(weights)
    for name in [n for n in weights if n.endswith("_scale_inv")]:
        scales, stored = weights.pop(name), name.removesuffix("_scale_inv")
        values = weights[stored].float()
        spread = scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: values.shape[0], : values.shape[1]]
        weights[stored] = values * spread


def test_blocks_of_fp8_are_read_as_what_they_stand_for(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    (tmp_path / "packed").mkdir()
    (tmp_path / "dense").mkdir()
    packed = rewritten(tiny("deepseek-v3"), tmp_path / "packed", in_blocks, quantization_config=BLOCKS)
    dense = rewritten(tiny("deepseek-v3"), tmp_path / "dense", dequantized)
    assert torch.equal(run(load(packed), [TEXT])[0], run(load(dense), [TEXT])[0])
    assert not torch.equal(run(load(packed), [TEXT])[0], run(load(tiny("deepseek-v3")), [TEXT])[0])


def load_kept(folder: Path, *, kept: bool = True) -> Any:
    """In half precision by a quantization that multiplies FP8 as it is stored, or that doesn't."""
    pytest.importorskip("triton")
    from engine.plugins.quantization.narrow.linear import NarrowQuantization

    made = NarrowQuantization(torch.float16, scaled=kept)
    linears: Any = Offer(name="narrow", summary="made in a test", build=lambda options, **context: made)
    loader = SafetensorsLoader()
    config = loader.config(folder)
    return build_model(OFFER, linears, config, loader.open(folder, config), torch.float16)


def test_fp8_stays_fp8_where_the_quantization_multiplies_it(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    folder = rewritten(tiny("deepseek-v3"), tmp_path, in_blocks, quantization_config=BLOCKS)
    ours = load_kept(folder)
    assert ours.weight_bytes() < 0.75 * load_kept(folder, kept=False).weight_bytes()
    got, want = run(ours, [TEXT[:6]])[0], run(load(folder), [TEXT[:6]])[0]
    assert ((got - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.03


def without_a_scale(weights: dict[str, Tensor]) -> None:
    in_blocks(weights)
    del weights["model.layers.1.self_attn.o_proj.weight_scale_inv"]


def with_an_infinite_scale(weights: dict[str, Tensor]) -> None:
    in_blocks(weights)
    weights["model.layers.1.self_attn.o_proj.weight_scale_inv"][0, 0] = torch.inf


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (without_a_scale, "lacks tensor model.layers.1.self_attn.o_proj.weight_scale_inv"),
        (with_an_infinite_scale, "model.layers.1.self_attn.o_proj.weight_scale_inv has scales that are not finite"),
    ],
)
def test_scales_that_are_absent_or_no_numbers_are_refused(
    tiny: Callable[[str], Path], tmp_path: Path, change: Callable[[dict[str, Tensor]], None], words: str
) -> None:
    folder = rewritten(tiny("deepseek-v3"), tmp_path, change, quantization_config=BLOCKS)
    with pytest.raises(ValueError, match=words):
        load(folder)
    with pytest.raises(ValueError, match=words):
        load_kept(folder)


def plain(**changes: Any) -> dict[str, Any]:
    """A config that is accepted, but for the changes."""
    config = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "kv_lora_rank": 24,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "vocab_size": 160,
    } | changes
    return {key: value for key, value in config.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "implemented are DeepseekV2ForCausalLM, DeepseekV3ForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"kv_lora_rank": ...}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": "64"}, "qk_rope_head_dim must be a positive integer, not '64'"),
        ({"scoring_func": "tanh"}, "scoring_func 'tanh' is not implemented; known are softmax, sigmoid"),
        ({"topk_method": "greedy"}, "topk_method 'greedy' is not implemented for scoring_func 'sigmoid'"),
        ({"moe_layer_freq": 2}, "moe_layer_freq 2"),
        ({"n_group": 3}, "n_group 3 must divide n_routed_experts 8"),
        ({"topk_group": 5}, "topk_group 5"),
        ({"num_experts_per_tok": 5}, "num_experts_per_tok 5 is more than 2 of 4 groups hold"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config: 'awq'"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: 'fp8' with blocks of None"),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        read_profile(plain(**changes))


def test_profile_says_what_the_engine_needs() -> None:
    profile = read_profile(plain(eos_token_id=1, rope_scaling={"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}))
    assert (profile.kv_kind, profile.kv_heads, profile.head_dim, profile.v_head_dim) == (KVKind.MLA, 1, 32, 24)
    assert profile.scale == pytest.approx(24**-0.5 * 1.3688879454113936**2)
    assert profile.kv_elements_per_token == 2 * 32
    assert OFFER.architectures == frozenset(FAMILIES)


def test_a_dense_config_has_no_router() -> None:
    names = deepseek.weights(plain(n_routed_experts=None))
    assert not any("experts" in name or "mlp.gate." in name for name in names)


def test_greedy_groups_count_for_their_best_expert() -> None:
    """Of two groups, the one with the single best expert wins without a correction, the better pair with one."""
    logits = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    rule = {"scoring": "sigmoid", "experts": 4, "chosen": 1, "groups": 2, "chosen_groups": 1}
    plainly, _ = route(torch.ones(1, 1), logits.T, None, Routing(**rule))
    corrected, _ = route(torch.ones(1, 1), logits.T, torch.zeros(4), Routing(**rule, corrected=True))
    assert plainly.tolist() == [[0]]
    assert corrected.item() in (2, 3)
