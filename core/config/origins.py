"""Where each value of a configuration came from, so that errors and `engine config explain` can say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

Key = tuple[str | int, ...]
"""A place in the tree: `("kv_connectors", 0, "use")`."""


def dotted(key: Key) -> str:
    """`kv_connectors.0.use`"""
    return ".".join(map(str, key)) or "the configuration"


@dataclass(frozen=True, slots=True)
class Origin:
    """Who wrote a value."""

    text: str  # "engine.yaml:12" or "--set kv_cache.page_size"
    leaf: bool  # a scalar or an empty container, that is: written as it stands, not made of parts


@dataclass(frozen=True, slots=True)
class Origins:
    """The origin of every value that somebody wrote; what is absent is a default."""

    written: Mapping[Key, Origin] = field(default_factory=dict)

    def of(self, key: Key) -> str | None:
        """Who wrote the value at `key`; None for a default."""
        if found := self.written.get(key):
            return found.text
        # `attention: cpu` is short for `attention: {use: cpu}`.
        short = self.written.get(key[:-1]) if key and key[-1] == "use" else None
        return short.text if short and short.leaf else None

    def near(self, key: Key) -> str:
        """`engine.yaml:12: ` for the innermost written part of `key`, or nothing; begins an error's sentence."""
        for length in range(len(key), -1, -1):
            if found := self.written.get(key[:length]):
                return f"{found.text}: "
        return ""


__all__ = ["Key", "Origin", "Origins", "dotted"]
