"""What a cache of latent rows takes, planned and allocated, in both forms; and who may ask for 8 bits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.config.load import load_config
from engine.device_profiles import load_profile
from engine.kv_memory import cut_pool, pool_bytes
from engine.latent.rows import rows_of
from engine.planning.plan import Plan, make_plan
from engine.registry import Registry
from engine.testing.attention import mla

PLANS = Path(__file__).parents[2] / "examples/plan"
LITE = replace(mla(16, expanded=(192, 128), dtype="bfloat16"), windows=(None,) * 27)


def planned(name: str, *overrides: str) -> Plan:
    loaded = load_config(None, [f"model.source=path:{PLANS / name}", "model.loader=dummy", *overrides])
    return make_plan(loaded.config, Registry.discover(), load_profile("h200"), PLANS / name, context=32768)


@pytest.mark.parametrize(("dtype", "row"), [("auto", 1152), ("fp8", 656)])
def test_the_pool_is_as_large_as_the_plan_says(dtype: str, row: int) -> None:
    plan = planned("deepseek-v2-lite", f"kv_cache.dtype={dtype}", "kv_cache.pages=2048", "kv_cache.page_size=64")
    assert plan.pool is not None
    assert plan.pool.bytes_per_token == 27 * row
    layout = rows_of(replace(LITE, packed=dtype == "fp8")).layout(64)
    assert pool_bytes(layout, 27, 2048) == plan.pool.bytes == 27 * row * 64 * 2048
    pool = cut_pool(layout, 27, 3, torch.device("cpu"))
    assert sum(part.nbytes for parts in pool for part in parts) == 27 * row * 64 * 3


def test_eight_times_as_many_contexts_as_expanded_ones() -> None:
    plan = planned("deepseek-v2-lite", "kv_cache.memory=64GiB", "kv_cache.page_size=64")
    assert plan.pool is not None
    expanded = 27 * 16 * (192 + 128) * 2
    assert plan.pool.requests >= 8 * (64 * 2**30 // (expanded * 32768))
    packed = planned("deepseek-v2-lite", "kv_cache.memory=64GiB", "kv_cache.page_size=64", "kv_cache.dtype=fp8")
    assert packed.pool is not None
    assert packed.pool.requests > 1.7 * plan.pool.requests


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (["attention=reference"], 16),
        (["attention=flashmla"], 64),
        (["attention=flashmla", "kv_cache.page_size=64"], 64),
        (["attention=reference", "kv_cache.page_size=64"], 64),
    ],
)
def test_an_unset_page_size_follows_the_attention_backend(settings: list[str], size: int) -> None:
    plan = planned("deepseek-v2-lite", *settings)
    assert not plan.blocked
    assert plan.pool is not None
    assert plan.pool.page_size == size


def test_a_page_size_that_the_backend_does_not_know_is_refused() -> None:
    plan = planned("deepseek-v2-lite", "attention=flashmla", "kv_cache.page_size=32")
    assert plan.blocked[0].endswith("'flashmla' can't be used here: kv_cache.page_size 32 is not among 64")


def test_heads_in_8_bits_take_a_byte_each_for_their_scales() -> None:
    plan = planned("qwen2.5-7b", "kv_cache.dtype=fp8")
    assert not plan.blocked
    assert plan.pool is not None
    assert plan.pool.bytes_per_token == 28 * 4 * 2 * (128 + 1)
    assert planned("qwen2.5-7b").pool.bytes_per_token == 28 * 4 * 2 * 128 * 2  # type: ignore[union-attr]


def test_a_backend_without_8_bit_rows_is_refused_by_name() -> None:
    plan = planned("deepseek-v2-lite", "kv_cache.dtype=fp8", "attention.use=cpu")
    assert "lacks packed_rows" in plan.blocked[0]
    plan = planned("qwen2.5-7b", "kv_cache.dtype=fp8", "attention.use=reference")
    assert "lacks packed_heads" in plan.blocked[0]
