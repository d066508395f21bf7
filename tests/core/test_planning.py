"""Plans against facts: bytes of released models to the byte, and of tiny models as the engine allocates them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine.config.load import load_config
from engine.device_profiles import load_profile
from engine.planning.kv import compared, own_form
from engine.planning.plan import Plan, make_plan
from engine.planning.ranks import rank_fits
from engine.planning.weights import Kept, group_weights, rank_bytes, stored
from engine.registry import Registry

PLANS = Path(__file__).parents[2] / "examples/plan"
GIB = 2**30


def planned(
    folder: Path,
    device: str = "h200",
    overrides: tuple[str, ...] = (),
    context: int | None = None,
    forms: tuple[str, ...] = (),
) -> Plan:
    loaded = load_config(None, [f"model.source=path:{folder}", "model.loader=dummy", *overrides])
    return make_plan(loaded.config, Registry.discover(), load_profile(device), folder, context=context, forms=forms)


def test_deepseek_r1_at_131072_tokens_to_the_byte() -> None:
    plan = planned(PLANS / "deepseek-r1", context=131072, forms=("mha", "mla", "mla-fp8"))
    own, mha, mla, fp8 = (f.bytes_per_token(61, 1) * plan.context for f in plan.forms)
    assert own == mla == 4_605_345_792
    assert mha == 327_491_256_320
    assert fp8 == 61 * 656 * 131072
    assert [round(size / GIB, 3) for size in (mha, mla, fp8)] == [305.0, 4.289, 4.885]
    assert [f.bytes_per_token(61, 2) for f in plan.forms[:3]] == [2 * f.bytes_per_token(61, 1) for f in plan.forms[:3]]
    assert plan.profile.parameters == 671_026_419_200
    assert plan.pool is not None
    assert plan.pool.bytes_per_token == 70_272


def test_deepseek_v2_lite_keeps_nine_times_less_than_expanded() -> None:
    plan = planned(PLANS / "deepseek-v2-lite", forms=("mha", "gqa8"))
    own, mha, gqa8 = (f.bytes_per_token(27, 2) for f in plan.forms)
    assert (own, mha, gqa8) == (31_104, 276_480, 27 * 8 * 256 * 2)
    assert plan.profile.parameters == 15_706_484_224
    assert not plan.blocked


def test_qwen_on_an_h200() -> None:
    plan = planned(PLANS / "qwen2.5-7b", forms=("mla",))
    assert plan.weight_bytes == 2 * 7_615_616_512
    assert plan.forms[0].bytes_per_token(28, 2) == 28 * 4 * 256 * 2
    assert plan.forms[1].bytes_per_token(28, 2) == 28 * 576 * 2
    assert {g.name for g in plan.weights} >= {"embedding", "attention", "feed-forward", "output layer"}


def test_what_does_not_fit_is_said() -> None:
    plan = planned(PLANS / "deepseek-r1")
    assert any("do not fit into the 140.4 GiB of NVIDIA H200" in reason for reason in plan.blocked)
    small = planned(PLANS / "qwen2.5-7b", device="h200", overrides=("kv_cache.pages=10000000",))
    assert small.pool is None
    assert any("lower kv_cache.pages" in reason for reason in small.blocked)


def test_parts_that_do_not_fit_block_but_the_bytes_are_there() -> None:
    plan = planned(PLANS / "deepseek-v2-lite", overrides=("attention.use=cpu",))
    assert any("'cpu' can't be used here" in reason for reason in plan.blocked)
    assert plan.weight_bytes == 2 * 15_706_484_224
    assert plan.on == ()


def test_r1_divides_among_eight_h200_as_it_is_stored() -> None:
    plan = planned(PLANS / "deepseek-r1", context=131072)
    dense = {fit.ranks: fit for fit in plan.ranks}
    packed = {fit.ranks: fit for fit in plan.stored_ranks}
    assert dense[8].requests == 0
    assert packed[8].requests > 0
    assert packed[4].requests == 0
    assert packed[8].kv_bytes_per_token == packed[1].kv_bytes_per_token, "every rank keeps the latent rows"
    plain = 2 * 129_280 * 7168 + 61 * (2 * 7168 + 1536 + 512) + 7168 + 58 * 256 * (7168 + 1)
    assert plan.stored_bytes == pytest.approx((671_026_419_200 - plain) * (1 + 4 / 128**2) + 2 * plain, abs=1)


def test_fault_injection_is_no_faster_path() -> None:
    assert [words for words in planned(PLANS / "deepseek-v2-lite").slow if "faulty" in words] == []


def test_heads_that_do_not_divide_are_named() -> None:
    fits = {fit.ranks: fit for fit in planned(PLANS / "qwen2.5-7b").ranks}
    assert fits[4].problems == ()
    assert fits[4].kv_bytes_per_token == 28 * 256 * 2
    assert fits[8].problems == ("8 does not divide num_attention_heads 28",)
    assert fits[8].requests == 0


def test_ranks_hold_everything_once_but_for_what_is_copied() -> None:
    shapes = {
        "model.layers.0.self_attn.q_proj.weight": (8, 4),
        "model.layers.0.self_attn.kv_a_proj_with_mqa.weight": (6, 4),
        "model.layers.0.mlp.experts.3.up_proj.weight": (8, 4),
        "model.layers.0.input_layernorm.weight": (4,),
    }
    groups = group_weights(shapes, Kept(dtype_bytes=2, matrix_bytes=1.0))
    assert {g.name: g.bytes for g in groups} == {"attention": 56, "routed experts": 32, "norms and the rest": 8}
    assert rank_bytes(groups, 1, 1) == 96
    assert rank_bytes(groups, 4, 8) == 32 // 4 + 24 + 32 // 8 + 8


def test_a_tied_head_that_is_copied_counts_twice() -> None:
    groups = group_weights(
        {"model.embed_tokens.weight": (10, 4)}, Kept(dtype_bytes=2, matrix_bytes=2, copies_tied_head=True)
    )
    assert sum(g.bytes for g in groups) == 160
    assert sum(g.elements for g in groups) == 40


def test_only_blocks_of_fp8_are_stored_smaller() -> None:
    assert stored({}) is None
    assert stored({"quantization_config": {"quant_method": "awq"}}) is None
    kept = stored({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}})
    assert kept is not None
    assert kept.matrix_bytes == 1 + 4 / 128**2


@pytest.mark.parametrize("name", ["mqa", "gqa0", "gqa", ""])
def test_unknown_forms_are_refused(name: str) -> None:
    profile = planned(PLANS / "qwen2.5-7b").profile
    with pytest.raises(ValueError, match="no form of attention; known are mha, gqaN"):
        compared(name, profile, {})


def test_a_context_that_the_model_does_not_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="a context of 40000 tokens was asked for, but this model holds 1 to 32768"):
        planned(PLANS / "qwen2.5-7b", context=40000)


def test_slow_paths_and_what_is_off_are_named() -> None:
    plan = planned(PLANS / "deepseek-v2-lite", overrides=("model.dtype=float32",))
    assert any(line.startswith("quantization: none instead of the faster narrow") for line in plan.slow)
    assert any(line.startswith("speculation") for line in plan.off)
    assert any(line.startswith("model: deepseek") for line in plan.on)
    off = planned(PLANS / "qwen2.5-7b", overrides=("speculator=ngram", "kv_cache=paged"))
    assert any(line.startswith("scheduling ahead: a speculator") for line in off.off)


def test_ranks_are_planned_for_the_own_form() -> None:
    plan = planned(PLANS / "deepseek-v2-lite")
    assert own_form(plan.profile).elements == plan.profile.kv_elements_per_token
    config = json.loads((PLANS / "deepseek-v2-lite/config.json").read_text())
    memory, context = plan.device.memory_bytes, plan.context
    fits = rank_fits(plan.profile, config, plan.weights, kv_itemsize=2, memory_bytes=memory, context=context)
    assert fits == plan.ranks
    assert fits[0].requests == (memory - plan.weight_bytes) // (31_104 * context)
