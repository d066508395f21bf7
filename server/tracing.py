"""OpenTelemetry spans: one for each request that reaches the model, with its stretches below it.

The caller's W3C trace context (`traceparent`) is continued, and told back as `traceresponse`. Names of attributes are
those of OpenTelemetry's conventions for generative AI. Needs the extra `otel`, which is imported only here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import Headers

from engine.config.model import TracingSection
from engine.errors import ConfigError
from engine.server.exchange import Exchange, Run

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_UNTRACED: Final = ("/health", "/metrics", "/load")


class Tracing:
    """Makes the spans of one server and hands them to the provider's exporters."""

    def __init__(self, provider: TracerProvider, model: str) -> None:
        from opentelemetry import trace
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._trace, self._model = trace, model
        self._provider = provider
        self._tracer = provider.get_tracer("engine.server")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, exchange: Exchange, headers: Headers) -> None:
        """Open the span of a request, below its caller's."""
        if exchange.path.startswith(_UNTRACED):
            return
        exchange.span = self._tracer.start_span(
            f"{exchange.method} {exchange.path[:200]}",
            context=self._propagator.extract(dict(headers)),
            kind=self._trace.SpanKind.SERVER,
            start_time=_nanoseconds(exchange, exchange.arrived),
            attributes={"http.request.method": exchange.method, "engine.request.id": exchange.id},
        )
        context = exchange.span.get_span_context()
        trace, span = f"{context.trace_id:032x}", f"{context.span_id:016x}"
        exchange.headers["traceresponse"] = f"00-{trace}-{span}-{context.trace_flags:02x}"
        exchange.trace = {"trace_id": trace, "span_id": span}

    def end(self, exchange: Exchange) -> None:
        """Close it, with what is known by now."""
        if (span := exchange.span) is None:
            return
        span.set_attribute("http.response.status_code", exchange.status)
        if exchange.runs:
            span.set_attributes(self._attributes(exchange))
            for run in exchange.runs:
                self._stretches(exchange, run)
        if exchange.status >= 500 or not exchange.status:
            span.set_status(self._trace.StatusCode.ERROR)
        span.end(end_time=_nanoseconds(exchange, exchange.ended or exchange.arrived))

    def close(self) -> None:
        """Send what is left; waits for the collector."""
        self._provider.shutdown()

    def _attributes(self, exchange: Exchange) -> dict[str, Any]:
        runs = exchange.runs
        first = min((run.first for run in runs if run.first is not None), default=None)
        found = {
            "gen_ai.operation.name": "chat"
            if "chat" in exchange.path or "messages" in exchange.path
            else "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": runs[0].prompt_tokens,
            "gen_ai.usage.output_tokens": sum(run.tokens for run in runs),
            "gen_ai.response.finish_reasons": [run.reason for run in runs],
            "gen_ai.usage.cache_read.input_tokens": runs[0].cached_tokens,
        }
        return found | ({} if first is None else {"gen_ai.server.time_to_first_token": first - exchange.arrived})

    def _stretches(self, exchange: Exchange, run: Run) -> None:
        """Spans of queue, prefill and decode, as the core timed them."""
        if (timing := run.timing) is None:
            return
        at = run.began
        for name, seconds in (("queue", timing.queue), ("prefill", timing.prefill), ("decode", timing.decode)):
            span = self._tracer.start_span(
                name,
                context=self._trace.set_span_in_context(exchange.span),
                start_time=_nanoseconds(exchange, at),
                attributes={"engine.choice.id": run.request_id},
            )
            if name == "decode":
                span.set_attributes({"engine.stalled": timing.stalled, "engine.preemptions": timing.preemptions})
            at += seconds
            span.end(end_time=_nanoseconds(exchange, at))


def build_tracing(section: TracingSection, model: str) -> Tracing | None:
    """Tracing as configured; None when it is off.

    Raises:
        ConfigError: the libraries are missing.
    """
    if section.endpoint is None:
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise ConfigError(
            f"tracing.endpoint is set, but OpenTelemetry is not installed ({error}); pip install 'engine-llm[otel]'"
        ) from None
    provider = TracerProvider(
        resource=Resource.create({"service.name": section.service_name}),
        sampler=ParentBasedTraceIdRatio(section.sample_ratio),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=section.endpoint)))
    return Tracing(provider, model)


def _nanoseconds(exchange: Exchange, moment: float) -> int:
    """A moment of the monotonic clock as nanoseconds since the epoch."""
    return int((exchange.date + moment - exchange.arrived) * 1e9)


__all__ = ["Tracing", "build_tracing"]
