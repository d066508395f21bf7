"""The core's own counters as Prometheus metrics."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from engine.server.speculation_metrics import speculation_metrics


class CoreMetrics(Collector):
    """What the core says about itself, as of the last scrape."""

    def __init__(self, model: str) -> None:
        self._labels = [model]
        self._gauges: dict[str, tuple[str, float]] = {}
        self._counters: dict[str, tuple[str, float]] = {}
        self._transfers: dict[str, int] = {}
        self._cache_details: dict[str, int] = {}
        self._drafts: dict[str, Any] = {}

    def take(self, running: int, waiting: int, core: dict[str, Any] | None) -> None:
        """Remember the latest numbers."""
        self._gauges["engine_num_requests_running"] = ("Requests being computed.", running)
        self._gauges["engine_num_requests_waiting"] = ("Requests in the queue.", waiting)
        if core is None:
            return
        cache = core["kv_cache"]
        usage = cache["held"] / cache["pages"]
        self._gauges["engine_kv_transfers_open"] = ("Publications and fetches under way.", len(core["transfers"]))
        self._gauges["engine_kv_cache_usage_perc"] = ("Share of the pages held by requests, 0 to 1.", usage)
        self._counters = {
            "engine_prefix_cache_queries": ("Prompt tokens looked up in the KV cache.", cache["lookup_tokens"]),
            "engine_prefix_cache_hits": ("Prompt tokens found in the KV cache.", cache["hit_tokens"]),
            "engine_kv_cache_evicted_pages": ("Cached pages that gave way.", cache["evicted_pages"]),
            "engine_num_preemptions": ("Requests that lost their pages and start again.", core["preemptions"]),
            "engine_steps": ("Steps scheduled.", core["steps"]),
        }
        self._transfers = core["transfers_ended"]
        self._cache_details = cache.get("details", {})
        if pacing := core.get("pacing"):  # only with a latency target
            self._counters |= {
                "engine_steps_mixed": ("Steps of both streams and prompts.", pacing["mixed_steps"]),
                "engine_steps_late": ("Mixed steps that took longer than the target.", pacing["late_steps"]),
            }
        self._drafts = core["drafts"]

    def collect(self) -> Iterator[Metric]:
        for name, (text, value) in self._gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, (text, value) in self._counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter
        details = GaugeMetricFamily(
            "engine_kv_cache_detail", "What the KV cache says beside, by name.", labels=["model_name", "name"]
        )
        for name, number in self._cache_details.items():
            details.add_metric([*self._labels, name], number)
        yield details
        ended = CounterMetricFamily(
            "engine_kv_transfers_ended", "Publications and fetches that ended, by how.", labels=["model_name", "state"]
        )
        for state, count in self._transfers.items():
            ended.add_metric([*self._labels, state], count)
        yield ended
        yield from speculation_metrics(self._labels[0], self._drafts)


__all__ = ["CoreMetrics"]
