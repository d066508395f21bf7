"""Expected costs: bytes over bandwidth and FLOPs over FLOP/s, to the number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.capabilities import KVKind
from engine.composition import Composition
from engine.config.model import EngineConfig
from engine.costs import Cost, active_weights, cost
from engine.device import DeviceProfile
from engine.device_profiles import load_profile
from engine.plugin import Offer
from engine.specs.model import ModelOffer, ModelProfile
from engine.specs.quantization import QuantizationOffer

GPU = DeviceProfile(
    kind="cuda",
    name="a GPU",
    memory_bytes=2**36,
    cores=8,
    compute_capability=(9, 0),
    bandwidth_bytes_per_s=1e12,
    flops={"bfloat16": 1e14, "float32": 1e13},
)
PROFILE = ModelProfile(
    architecture="ToyForCausalLM",
    layers=2,
    hidden_size=8,
    vocab_size=10,
    max_context=1000,
    kv_kind=KVKind.GQA,
    heads=8,
    kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    scale=0.5,
    windows=(None, 100),
    softcap=None,
    dtype="bfloat16",
    eos_token_ids=(0,),
    parameters=10**6,
)
PLAIN: Offer[Any] = Offer(name="plain", summary="", build=lambda options: None)
SHAPES = {
    "model.embed_tokens.weight": (10, 8),
    "model.layers.0.self_attn.q_proj.weight": (8, 8),
    "model.layers.0.mlp.experts.0.up_proj.weight": (100, 8),
    "model.layers.0.mlp.experts.1.up_proj.weight": (100, 8),
    "lm_head.weight": (10, 8),
}


def model(weights: Mapping[str, tuple[int, ...]] | None) -> ModelOffer:
    return ModelOffer(
        name="toy",
        summary="",
        build=lambda options: None,
        architectures=frozenset({"ToyForCausalLM"}),
        profile=lambda config: PROFILE,
        weights=None if weights is None else lambda config: weights,
    )


def composition(device: DeviceProfile = GPU, dtype: str = "bfloat16") -> Composition:
    return Composition(
        config=EngineConfig(),
        device=device,
        model_path=Path(),
        model_config={},
        profile=PROFILE,
        dtype=dtype,
        max_context=1000,
        page_size=16,
        choices={"model": cast("Any", SimpleNamespace(offer=model(None)))},
    )


def found(point: str, offer: Offer[Any], **more: Any) -> Cost:
    answer = cost(composition(**more), point, offer)
    assert answer is not None
    return answer


def test_attention_reads_the_kv_that_its_windows_show() -> None:
    it = found("attention_backends", PLAIN)
    assert it.tokens == 1000
    assert it.decode_ms == pytest.approx(1e3 * (1000 + 100) * 2 * (64 + 64) * 2 / 1e12)
    pairs = 1000 * 1001 / 2 + (100 * 1000 - 100 * 99 / 2)
    assert it.prefill_ms == pytest.approx(1e3 * 2 * pairs * 8 * (64 + 64) / 1e14)


def test_the_pairs_of_a_window_are_those_that_counting_finds() -> None:
    counted = sum(min(position + 1, window) for window in (1000, 100) for position in range(1000))
    assert counted == 1000 * 1001 / 2 + (100 * 1000 - 100 * 99 / 2)


def test_linear_layers_read_every_weight_once_in_the_width_they_are_kept_in() -> None:
    assert found("quantizations", PLAIN).decode_ms == pytest.approx(1e3 * 2e6 / 1e12)
    assert found("quantizations", PLAIN, dtype="float32").decode_ms == pytest.approx(1e3 * 4e6 / 1e12)
    int4 = QuantizationOffer(name="int4", summary="", build=lambda options: None, bytes_per_weight=0.5)
    assert found("quantizations", int4).decode_ms == pytest.approx(1e3 * 0.5e6 / 1e12)
    assert found("quantizations", int4).prefill_ms == pytest.approx(1e3 * 2 * 1e6 * 1000 / 1e14)


def test_a_declared_efficiency_counts_on_its_kind_of_device_alone() -> None:
    measured = replace(PLAIN, efficiency={"cuda": 0.5})
    assert found("quantizations", measured).decode_ms == 2 * found("quantizations", PLAIN).decode_ms
    assert (found("quantizations", measured).measured, found("quantizations", PLAIN).measured) == (True, False)
    assert not found("quantizations", replace(PLAIN, efficiency={"cpu": 0.5})).measured


def test_a_dtype_that_the_device_lacks_is_computed_in_float32() -> None:
    assert found("quantizations", PLAIN, dtype="float16").prefill_ms == pytest.approx(1e3 * 2e9 / 1e13)
    assert found("quantizations", PLAIN, device=replace(GPU, flops={})).prefill_ms is None


def test_other_parts_and_unknown_devices_have_no_cost() -> None:
    assert cost(composition(), "kv_caches", PLAIN) is None
    assert cost(composition(device=replace(GPU, bandwidth_bytes_per_s=None)), "quantizations", PLAIN) is None


def test_a_detected_device_has_the_figures_of_the_known_one_of_its_name() -> None:
    bare = replace(GPU, name="NVIDIA H200", bandwidth_bytes_per_s=None, flops={}, here=True)
    assert found("quantizations", PLAIN, device=bare) == found("quantizations", PLAIN, device=load_profile("h200"))


def test_of_listed_weights_those_count_that_take_part() -> None:
    config = {"n_routed_experts": 2, "num_experts_per_tok": 1}
    assert active_weights(model(SHAPES), config, PROFILE) == 64 + 800 + 80
    tied = {name: shape for name, shape in SHAPES.items() if name != "lm_head.weight"}
    assert active_weights(model(tied), config, PROFILE) == 80 + 64 + 800
    assert active_weights(model(None), config, PROFILE) == PROFILE.parameters


@pytest.mark.parametrize(
    ("it", "text"),
    [
        (
            Cost(tokens=9, decode_ms=1.234, prefill_ms=2345.6, measured=True),
            "decode 1.23 ms/token, prompt at least 2,346 ms",
        ),
        (Cost(tokens=9, decode_ms=0.01, prefill_ms=None, measured=False), "decode at least 0.01 ms/token"),
    ],
)
def test_in_words(it: Cost, text: str) -> None:
    assert str(it) == text
