"""The router's YAML: which engines there are, and how requests find their way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from engine.config.load import load_tree
from engine.config.model import ListenSection, LoggingSection, Section


def _url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("expected the address of an engine such as http://10.0.0.5:8000")
    return value.rstrip("/")


Url = Annotated[str, AfterValidator(_url)]


class HandoverSection(Section):
    """Whether the prompt is computed by an engine of the pool `prefill`."""

    mode: Literal["auto", "always", "never"] = Field(
        default="auto",
        description="auto takes what costs less by measured times; always hands over whenever a prefill engine lives.",
    )
    stall_weight: float = Field(
        default=1.0,
        ge=0,
        description="For auto: how much a second counts by which a prompt delays each stream of a decode engine, "
        "against a second that its own client waits.",
    )


class ProbeSection(Section):
    """How the router learns which engines live."""

    seconds: float = Field(default=0.5, gt=0, description="Between two looks at an engine.")
    timeout: float = Field(default=2.0, gt=0, description="Seconds that an engine has for an answer to a probe.")
    failures: int = Field(
        default=3, gt=0, description="Probes in a row without an answer after which an engine counts as dead."
    )
    key: SecretStr | None = Field(
        default=None, description="API key with the scope metrics, for /load of engines that want one."
    )


class RetrySection(Section):
    """What happens when an engine fails on a request."""

    attempts: int = Field(default=4, gt=0, description="Engines that one request is tried on, before its client hears.")
    connect_seconds: float = Field(default=2.0, gt=0, description="How long connecting to an engine may take.")
    wait_seconds: float = Field(
        default=10.0, ge=0, description="How long a request waits for an engine to come up while none lives."
    )


class PrefixSection(Section):
    """Requests with a common beginning go to the engine that has it in its cache."""

    block: int = Field(default=256, gt=0, description="Bytes of the prompt's text that are compared as one.")
    remembered: int = Field(default=100_000, gt=0, description="Blocks that are remembered of each engine.")
    slack: int = Field(
        default=4,
        ge=0,
        description="By how many requests the engine with the prefix may be busier than the least busy.",
    )


class RouterLogging(LoggingSection):
    """What is written to stderr."""

    requests: bool = Field(
        default=False, description="Write a line per HTTP request: id, path, status, seconds; never its text."
    )


class RouterConfig(Section):
    """The whole tree."""

    server: ListenSection = ListenSection()
    prefill: list[Url] = Field(default_factory=list, description="Engines that compute prompts for others.")
    decode: list[Url] = Field(min_length=1, description="Engines that answer.")
    handover: HandoverSection = HandoverSection()
    probe: ProbeSection = ProbeSection()
    retry: RetrySection = RetrySection()
    prefix: PrefixSection = PrefixSection()
    admin_key: SecretStr | None = Field(default=None, description="Opens /engine/…; closed if unset.")
    logging: RouterLogging = RouterLogging()

    @model_validator(mode="after")
    def _each_once(self) -> RouterConfig:
        urls = [*self.prefill, *self.decode]
        if twice := [url for url in urls if urls.count(url) > 1]:
            raise ValueError(f"expected each engine once, but {twice[0]} is named twice")
        return self


def load_router(path: Path, overrides: Sequence[str] = ()) -> RouterConfig:
    """Read, override, expand secrets, validate.

    Raises:
        ConfigError: one line per problem, each with file and line, key, value and what was expected.
    """
    return load_tree(RouterConfig, path, overrides)[0]


__all__ = ["HandoverSection", "PrefixSection", "ProbeSection", "RetrySection", "RouterConfig", "load_router"]
