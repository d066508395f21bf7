"""A plan's bytes are those that the engine really takes, for tiny models on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.assemble import assemble
from engine.config.load import load_config
from engine.device import detect
from engine.planning.plan import make_plan
from engine.registry import Registry
from engine.runner import KVPool, Runner
from engine.specs.attention import AttentionBackend
from engine.specs.model import Model


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("qwen2", "float32"),
        ("qwen2", "bfloat16"),
        ("llama-tied", "float32"),
        ("llama-tied", "bfloat16"),
        ("deepseek-v2", "bfloat16"),
        ("deepseek-v3", "float32"),
    ],
)
def test_predicted_bytes_are_those_allocated(
    tiny: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    folder, seen, made = tiny(name), [], Runner.__init__

    def watched(runner: Runner, model: Model, backend: AttentionBackend, pool: KVPool, **more: Any) -> None:
        seen.append((model.weight_bytes(), sum(part.nbytes for layer in pool for part in layer)))
        made(runner, model, backend, pool, **more)

    monkeypatch.setattr(Runner, "__init__", watched)  # of every kind of runner
    loaded = load_config(None, [f"model.source=path:{folder}", f"model.dtype={dtype}", "kv_cache.pages=64"])
    plan = make_plan(loaded.config, Registry.discover(), detect("cpu"), folder)
    assemble(loaded.config, folder).engine.close()
    ((weights, pool),) = seen
    assert plan.pool is not None
    assert weights == pytest.approx(plan.weight_bytes, rel=0.02)
    assert pool == pytest.approx(plan.pool.bytes, rel=0.02)
