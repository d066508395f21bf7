"""What the core says only sometimes, as metrics."""

from __future__ import annotations

from typing import Any

from engine.server.core_metrics import CoreMetrics


def samples(core: dict[str, Any]) -> dict[tuple[str, str], float]:
    metrics = CoreMetrics("tiny")
    metrics.take(1, 2, core)
    return {(s.name, s.labels.get("name", "")): s.value for metric in metrics.collect() for s in metric.samples}


def test_a_cache_and_a_latency_target_have_numbers_of_their_own() -> None:
    cache = dict.fromkeys(("pages", "free", "cached", "held", "lookup_tokens", "hit_tokens", "evicted_pages"), 1)
    core = {"kv_cache": cache, "preemptions": 0, "steps": 9, "drafts": {}, "transfers": [], "transfers_ended": {}}
    plain = samples(core)
    assert ("engine_steps_late_total", "") not in plain
    assert not [name for name, _ in plain if name == "engine_kv_cache_detail"]
    core["pacing"] = {"target": 0.2, "mixed_steps": 5, "late_steps": 2, "costs": {}}
    found = samples({**core, "kv_cache": {**cache, "details": {"bypassing": 1, "proven_pages": 7}}})
    assert (found["engine_steps_mixed_total", ""], found["engine_steps_late_total", ""]) == (5, 2)
    assert found["engine_kv_cache_detail", "bypassing"] == 1
    assert found["engine_kv_cache_detail", "proven_pages"] == 7
