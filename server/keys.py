"""API keys: who is calling, what the key opens, and which cached prefixes it may find."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from starlette.datastructures import Headers

from engine.config.model import KeySection
from engine.errors import ConfigError
from engine.specs.rate_limit import Rate

Scope = Literal["infer", "metrics", "admin"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key as the server knows it, without its text."""

    name: str
    scopes: frozenset[str]
    salt: str = ""  # keeps its cached prefixes apart from those of others
    rate: Rate = field(default_factory=Rate)
    weight: float = 1.0
    concurrent: int | None = None  # requests answered at once

    def salted(self, salt: str) -> str:
        """The cache salt of a request that brings one of its own, or none."""
        return f"{self.salt}\0{salt}" if self.salt else salt


ANYONE = Key(name="", scopes=frozenset({"infer", "metrics"}))
"""Whoever calls a server without keys. Never an administrator: any web page may call a local server from a browser."""


class KeyRing:
    """The keys of one server.

    Raises:
        ConfigError: two keys have the same text or name.
    """

    def __init__(self, sections: Sequence[KeySection]) -> None:
        self._keys = [(section.key.get_secret_value().encode(), _key(section)) for section in sections]
        for what, values in (
            ("texts", [text for text, _ in self._keys]),
            ("names", [key.name for _, key in self._keys]),
        ):
            if len(set(values)) < len(values):
                raise ConfigError(f"two keys of server.api_keys have the same {what[:-1]}; give each its own")

    @property
    def open(self) -> bool:
        """Whether nobody needs a key."""
        return not self._keys

    def find(self, headers: Headers) -> Key | None:
        """The key that a request brings as `Authorization: Bearer KEY` or `X-Api-Key: KEY`."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        text = given if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        sent = text.strip().encode("latin-1")  # the bytes as they came
        # Every key is compared in full, so that the time taken tells nothing.
        found = [key for known, key in self._keys if hmac.compare_digest(sent, known)]
        return found[0] if found else None

    @property
    def limited(self) -> bool:
        """Whether any key has a rate limit."""
        return any(key.rate != Rate() for _, key in self._keys)


def scope_of(path: str) -> Scope | None:
    """The scope that a path takes, whoever added the route; None for health checks, which are open."""
    if path == "/health" or path.startswith("/health/"):
        return None
    if path in ("/metrics", "/load"):
        return "metrics"
    return "admin" if path == "/engine" or path.startswith("/engine/") else "infer"


def _key(section: KeySection) -> Key:
    digest = hashlib.blake2b(section.key.get_secret_value().encode(), digest_size=8).hexdigest()
    return Key(
        name=section.name or f"key-{digest[:8]}",
        scopes=frozenset(section.scopes),
        salt=f"key {digest}" if section.cache_group is None else f"group {section.cache_group}",
        rate=Rate(requests=section.requests_per_minute, tokens=section.tokens_per_minute),
        weight=section.weight,
        concurrent=section.concurrent_requests,
    )


__all__ = ["ANYONE", "Key", "KeyRing", "Scope", "scope_of"]
