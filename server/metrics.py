"""Prometheus metrics of one server: `engine_…` with the suffixes of the field, and the same as `vllm:…` for dashboards.

Every server owns its registry, so two of them in one process don't meet. Durations are in seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

import msgspec
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

from engine.messages import Timing
from engine.server.core_metrics import CoreMetrics
from engine.server.exchange import Run

_TTFT: Final = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_GAPS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5)
_LATENCY: Final = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920)
_STRETCHES: Final = (0.001, 0.005, 0.01, 0.05, 0.1, *_LATENCY)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)

_ALIASED: Final = frozenset(
    {
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "spec_decode_num_drafts",
        "spec_decode_num_draft_tokens",
        "spec_decode_num_accepted_tokens",
        "spec_decode_num_accepted_tokens_per_pos",
        "prompt_tokens",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_inference_time_seconds",
        "request_prompt_tokens",
        "request_generation_tokens",
        "request_params_max_tokens",
    }
)
"""What is also shown as `vllm:NAME`; the rest is ours alone."""
_ALIAS_LABELS: Final = {"engine": "0"}


class Metrics:
    """Counts what passes through the server and shows it together with the core's own counters."""

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._load = CoreMetrics(model)
        self.registry.register(self._load)
        own = {"labelnames": ("model_name",), "registry": self.registry}
        at = {"model_name": model}
        self._model = model
        self.prompt_tokens = Counter("engine_prompt_tokens", "Prompt tokens taken.", **own).labels(**at)  # type: ignore[arg-type]
        self.cached = Counter("engine_prompt_tokens_cached", "Prompt tokens not computed again.", **own).labels(**at)  # type: ignore[arg-type]
        self.generated = Counter("engine_generation_tokens", "Tokens generated.", **own).labels(**at)  # type: ignore[arg-type]
        self._finished = Counter(
            "engine_request_success",
            "Requests that ended, by reason.",
            ("model_name", "finished_reason"),
            registry=self.registry,
        )
        self.first = self._histogram("engine_time_to_first_token_seconds", "From arrival to the first token.", _TTFT)
        self.gap = self._histogram("engine_inter_token_latency_seconds", "Between outputs of a request.", _GAPS)
        self.latency = self._histogram("engine_e2e_request_latency_seconds", "From arrival to the end.", _LATENCY)
        self.prompt_size = self._histogram("engine_request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self.output_size = self._histogram("engine_request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self.most = self._histogram("engine_request_params_max_tokens", "The bound that a request set.", _TOKENS)
        per_token = "From the first token to the end, by token after the first."
        self.per_token = self._histogram("engine_request_time_per_output_token_seconds", per_token, _GAPS)
        self.stretches = {
            name: self._histogram(f"engine_request_{name}_time_seconds", text, _STRETCHES)
            for name, text in (
                ("queue", "From the core's queue to admission."),
                ("prefill", "From admission to the first token."),
                ("decode", "From the first token to the end."),
                ("inference", "From admission to the end."),
                ("stalled", "Of decode: by how much prompts of others made steps longer."),
                ("preempted", "Waiting for pages after a preemption."),
            )
        }
        self._answers = Counter(
            "engine_http_responses", "HTTP answers, by status.", ("model_name", "status"), registry=self.registry
        )

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, text, ("model_name",), buckets=buckets, registry=self.registry).labels(self._model)

    def begin(self, run: Run) -> Watch:
        """A request goes to the core."""
        self.prompt_tokens.inc(run.prompt_tokens)
        self.prompt_size.observe(run.prompt_tokens)
        if run.max_tokens is not None:
            self.most.observe(run.max_tokens)
        return Watch(self, run)

    def answered(self, status: int) -> None:
        """An HTTP answer is over; status 0 if the client was gone before it began."""
        self._answers.labels(self._model, str(status or 499)).inc()

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
    """Times one request of the core, for the metrics and in its `Run`."""

    __slots__ = ("_metrics", "_run")

    def __init__(self, metrics: Metrics, run: Run) -> None:
        self._metrics, self._run = metrics, run

    def output(self, tokens: int, cached_tokens: int, timing: Timing | None) -> None:
        """Tokens arrived; the core's account with the last of them."""
        run = self._run
        run.timing = timing or run.timing
        if not tokens:
            return
        now = time.monotonic()
        if run.first is None:
            run.first, run.cached_tokens = now, cached_tokens
            self._metrics.first.observe(now - run.began)
            self._metrics.cached.inc(cached_tokens)
        else:
            self._metrics.gap.observe(now - run.last)
        self._metrics.generated.inc(tokens)
        run.tokens += tokens
        run.last = now

    def end(self, reason: str) -> None:
        """The request is over."""
        run, metrics = self._run, self._metrics
        run.ended, run.reason = time.monotonic(), reason
        if run.timing is not None and run.first is not None and not run.timing.decode:
            # Ended here, by a stop string or its client: the core's last account is that of the first token.
            run.timing = msgspec.structs.replace(run.timing, decode=run.last - run.first)
        metrics.latency.observe(run.ended - run.began)
        metrics.output_size.observe(run.tokens)
        metrics.finished(reason)
        if run.first is not None and run.tokens > 1:
            metrics.per_token.observe((run.last - run.first) / (run.tokens - 1))
        if (timing := run.timing) is not None:
            for name, histogram in metrics.stretches.items():
                known = timing.prefill + timing.decode if name == "inference" else getattr(timing, name)
                histogram.observe(known)


class _Aliases(Collector):
    """The same samples under other names, made while they are scraped: counting costs nothing extra."""

    def __init__(self, source: CollectorRegistry) -> None:
        self._source = source

    def collect(self) -> Iterator[Metric]:
        for family in self._source.collect():
            if (name := family.name.removeprefix("engine_")) not in _ALIASED:
                continue
            alias = f"vllm:{name}"
            renamed = Metric(alias, family.documentation, family.type)
            renamed.samples = [
                Sample(alias + s.name.removeprefix(family.name), {**s.labels, **_ALIAS_LABELS}, s.value)
                for s in family.samples
                if not s.name.endswith("_created")
            ]
            yield renamed


__all__ = ["Metrics", "Watch"]
