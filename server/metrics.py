"""Prometheus metrics of one server: `engine_…`, and the names under which dashboards of vLLM look for the same.

Every server owns its registry, so two of them in one process don't meet. Durations are in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

_TTFT: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LATENCY: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_ALIASES: Final = {
    "engine_requests_running": "vllm:num_requests_running",
    "engine_requests_waiting": "vllm:num_requests_waiting",
    "engine_kv_cache_usage_ratio": "vllm:kv_cache_usage_perc",
    "engine_prefix_cache_queries": "vllm:prefix_cache_queries",
    "engine_prefix_cache_hits": "vllm:prefix_cache_hits",
    "engine_preemptions": "vllm:num_preemptions",
    "engine_spec_decode_num_drafts": "vllm:spec_decode_num_drafts",
    "engine_spec_decode_num_draft_tokens": "vllm:spec_decode_num_draft_tokens",
    "engine_spec_decode_num_accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "engine_prompt_tokens": "vllm:prompt_tokens",
    "engine_prompt_tokens_cached": "vllm:prompt_tokens_cached",
    "engine_generation_tokens": "vllm:generation_tokens",
    "engine_requests_finished": "vllm:request_success",
    "engine_time_to_first_token_seconds": "vllm:time_to_first_token_seconds",
    "engine_inter_token_latency_seconds": "vllm:inter_token_latency_seconds",
    "engine_request_latency_seconds": "vllm:e2e_request_latency_seconds",
    "engine_request_prompt_tokens": "vllm:request_prompt_tokens",
    "engine_request_generation_tokens": "vllm:request_generation_tokens",
}
_ALIAS_LABELS: Final = {"engine": "0"}


class Metrics:
    """Counts what passes through the server and shows it together with the core's own counters."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._load = _CoreMetrics(model)
        self.registry.register(self._load)
        own = {"labelnames": ("model_name",), "registry": self.registry}
        at = {"model_name": model}
        self._model = model
        self.prompt_tokens = Counter("engine_prompt_tokens", "Prompt tokens taken.", **own).labels(**at)  # type: ignore[arg-type]
        self.cached = Counter("engine_prompt_tokens_cached", "Prompt tokens not computed again.", **own).labels(**at)  # type: ignore[arg-type]
        self.generated = Counter("engine_generation_tokens", "Tokens generated.", **own).labels(**at)  # type: ignore[arg-type]
        self._finished = Counter(
            "engine_requests_finished",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.first = self._histogram("engine_time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.gap = self._histogram("engine_inter_token_latency_seconds", "Between outputs of a request.", _GAPS)
        self.latency = self._histogram("engine_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self.prompt_size = self._histogram("engine_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_size = self._histogram("engine_request_generation_tokens", "Tokens of an answer.", _TOKENS)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry).labels(self._model)

    def begin(self, prompt_tokens: int) -> Watch:
        """A request goes to the core."""
        self.prompt_tokens.inc(prompt_tokens)
        self.prompt_size.observe(prompt_tokens)
        return Watch(self)

    def finished(self, reason: str) -> None:
        """A request ended: stop, length, abort, error or refused."""
        self._finished.labels(self._model, reason).inc()

    def expose(self, running: int, waiting: int, core: dict[str, Any] | None) -> bytes:
        """The text format of Prometheus, aliases included.

        Args:
            running, waiting: requests in the core.
            core: what the core answers to `stats`; None when it doesn't answer.
        """
        self._load.take(running, waiting, core)
        aliases = CollectorRegistry(auto_describe=False)
        aliases.register(_Aliases(self.registry))
        return generate_latest(self.registry) + generate_latest(aliases)


class Watch:
    """Times one request of the core."""

    __slots__ = ("_first", "_last", "_metrics", "_start", "_tokens")

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = self._last = time.perf_counter()
        self._tokens = 0

    def output(self, tokens: int, cached_tokens: int) -> None:
        """Tokens arrived."""
        if not tokens:
            return
        now = time.perf_counter()
        if self._tokens == 0:
            self._metrics.first.observe(now - self._start)
            self._metrics.cached.inc(cached_tokens)
        else:
            self._metrics.gap.observe(now - self._last)
        self._metrics.generated.inc(tokens)
        self._tokens += tokens
        self._last = now

    def end(self, reason: str) -> None:
        """The request is over."""
        self._metrics.latency.observe(time.perf_counter() - self._start)
        self._metrics.output_size.observe(self._tokens)
        self._metrics.finished(reason)


class _CoreMetrics(Collector):
    """What the core says about itself, as of the last scrape."""

    def __init__(self, model: str) -> None:
        self._labels = [model]
        self._gauges: dict[str, tuple[str, float]] = {}
        self._counters: dict[str, tuple[str, float]] = {}

    def take(self, running: int, waiting: int, core: dict[str, Any] | None) -> None:
        """Remember the latest numbers."""
        self._gauges["engine_requests_running"] = ("Requests being computed.", running)
        self._gauges["engine_requests_waiting"] = ("Requests in the queue.", waiting)
        if core is None:
            return
        cache = core["kv_cache"]
        usage = cache["held"] / cache["pages"]
        self._gauges["engine_kv_cache_usage_ratio"] = ("Share of the pages held by requests.", usage)
        self._counters = {
            "engine_prefix_cache_queries": ("Prompt tokens looked up in the KV cache.", cache["lookup_tokens"]),
            "engine_prefix_cache_hits": ("Prompt tokens found in the KV cache.", cache["hit_tokens"]),
            "engine_kv_cache_evicted_pages": ("Cached pages that gave way.", cache["evicted_pages"]),
            "engine_preemptions": ("Requests that lost their pages and start again.", core["preemptions"]),
            "engine_steps": ("Steps scheduled.", core["steps"]),
        }
        if drafts := core["drafts"]:  # an engine without a speculator has no such counters
            self._counters |= {
                "engine_spec_decode_num_drafts": ("Drafts verified.", drafts["steps"]),
                "engine_spec_decode_num_draft_tokens": ("Draft tokens verified.", drafts["drafted"]),
                "engine_spec_decode_num_accepted_tokens": ("Draft tokens kept.", drafts["accepted"]),
                "engine_spec_decode_faults": ("Proposals that raised or were malformed.", drafts["faults"]),
            }

    def collect(self) -> Iterator[Metric]:
        for name, (text, value) in self._gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric(self._labels, value)
            yield gauge
        for name, (text, value) in self._counters.items():
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric(self._labels, value)
            yield counter


class _Aliases(Collector):
    """The same samples under other names, made while they are scraped: counting costs nothing extra."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if (alias := _ALIASES.get(family.name)) is None:
                continue
            renamed = Metric(alias, family.documentation, family.type)
            renamed.samples = [
                Sample(alias + s.name.removeprefix(family.name), {**s.labels, **_ALIAS_LABELS}, s.value)
                for s in family.samples
                if not s.name.endswith("_created")
            ]
            yield renamed


__all__ = ["Metrics", "Watch"]
