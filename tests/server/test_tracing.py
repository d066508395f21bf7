"""OpenTelemetry: spans of requests with the caller's context, in memory and to a collector over HTTP."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine.config.load import load_config
from engine.messages import FinishReason, Output, Timing
from engine.server.tracing import Tracing, build_tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def answer(call: Any) -> list[Output]:
    timing = Timing(queue=0.1, prefill=0.2, decode=0.3, stalled=0.05)
    return [
        Output("", token_ids=[104], cached_tokens=1),
        Output("", [105], None, None, FinishReason.STOP, timing=timing),
    ]


class Traced:
    """A server whose spans stay in memory."""

    def __init__(self, serving: Any) -> None:
        self.exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.live = serving(answer)
        self.live.state.tracing = Tracing(provider, "tiny")

    def spans(self, count: int) -> dict[str, ReadableSpan]:
        self.live.until(lambda: len(self.exporter.get_finished_spans()) >= count)
        return {span.name: span for span in self.exporter.get_finished_spans()}


@pytest.fixture
def traced(serving: Any) -> Traced:
    return Traced(serving)


def test_a_request_is_a_span_below_its_callers(traced: Traced) -> None:
    response = traced.live.http.post("/v1/completions", json={"prompt": "abc"}, headers={"traceparent": PARENT})
    spans = traced.spans(4)
    span = spans["POST /v1/completions"]
    assert span.parent is not None
    assert f"{span.context.trace_id:032x}" == PARENT.split("-")[1]
    assert f"{span.parent.span_id:016x}" == PARENT.split("-")[2]
    assert response.headers["traceresponse"] == f"00-{PARENT.split('-')[1]}-{span.context.span_id:016x}-01"
    found = dict(span.attributes or {})
    assert (found["gen_ai.request.model"], found["gen_ai.usage.input_tokens"]) == ("tiny", 3)
    assert (found["gen_ai.usage.output_tokens"], found["gen_ai.response.finish_reasons"]) == (2, ("stop",))
    assert (found["http.response.status_code"], found["engine.request.id"]) == (200, response.headers["x-request-id"])
    assert "abc" not in str(found)


def test_the_stretches_lie_below_it_one_after_the_other(traced: Traced) -> None:
    traced.live.complete()
    spans = traced.spans(4)
    queue, prefill, decode = (spans[name] for name in ("queue", "prefill", "decode"))
    for span, seconds in ((queue, 0.1), (prefill, 0.2), (decode, 0.3)):
        assert span.parent == spans["POST /v1/completions"].context
        assert (span.end_time - span.start_time) / 1e9 == pytest.approx(seconds, abs=1e-6)
    assert prefill.start_time == pytest.approx(queue.end_time, abs=1000)
    assert (decode.attributes or {})["engine.stalled"] == 0.05


def test_without_a_caller_a_trace_begins_here(traced: Traced) -> None:
    for given in ({}, {"traceparent": "nonsense"}):
        header = traced.live.http.get("/v1/models", headers=given).headers["traceresponse"]
        assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[13]", header)


def test_probes_are_not_traced_and_failures_are_marked(traced: Traced) -> None:
    traced.live.http.get("/health")
    assert "traceresponse" not in traced.live.http.get("/metrics").headers
    traced.live.core.failed = "gone"
    assert traced.live.complete().status_code == 503
    spans = traced.spans(1)
    assert set(spans) == {"POST /v1/completions"}
    assert not spans["POST /v1/completions"].status.is_ok


class Collector(HTTPServer):
    """Keeps what exporters post."""

    def __init__(self) -> None:
        self.received: list[ExportTraceServiceRequest] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                outer.received.append(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as made:
        thread = threading.Thread(target=made.serve_forever)
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def test_spans_reach_a_collector(serving: Any, collector: Collector) -> None:
    endpoint = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    config = load_config(None, [f"tracing.endpoint={endpoint}", "tracing.service_name=mine"]).config
    live = serving(answer)
    live.state.tracing = build_tracing(config.tracing, "tiny")
    assert live.complete().status_code == 200
    live.until(lambda: not live.state.active)
    live.state.tracing.close()  # sends what is left
    (resource,) = collector.received[0].resource_spans
    assert "mine" in [attribute.value.string_value for attribute in resource.resource.attributes]
    names = {span.name for scope in resource.scope_spans for span in scope.spans}
    assert names == {"POST /v1/completions", "queue", "prefill", "decode"}


def test_off_by_default_and_nothing_is_imported() -> None:
    code = """
import sys
from engine.config.model import TracingSection
from engine.server.tracing import build_tracing
assert build_tracing(TracingSection(), "m") is None
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_libraries_the_error_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry.sdk.trace"] = None
from engine.config.model import TracingSection
from engine.errors import ConfigError
from engine.server.tracing import build_tracing
try:
    build_tracing(TracingSection(endpoint="http://127.0.0.1:1"), "m")
except ConfigError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert "pip install 'engine-llm[otel]'" in done.stdout
