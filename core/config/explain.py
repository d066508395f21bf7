"""Every value of a configuration and where it came from, secrets masked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel, SecretStr

from engine.config.components import located, named, validated_options
from engine.config.load import LoadedConfig
from engine.config.origins import Key, dotted
from engine.registry import Registry


class Row(NamedTuple):
    """One value."""

    key: str
    value: str
    origin: str  # "default", "engine.yaml:12" or "--set kv_cache.page_size"


def explain(loaded: LoadedConfig, registry: Registry) -> list[Row]:
    """All values in the order of the tree, the options of named components included. Raises ConfigError."""
    options = {
        component.key: validated_options(
            located(registry, component, loaded.origins), component.options, loaded.origins, component.key
        )
        for component in named(loaded.config)
        if component.chosen
    }
    return [
        Row(dotted(key), value, loaded.origins.of(key) or "default")
        for key, value in _leaves(loaded.config, (), {(*key, "options"): model for key, model in options.items()})
    ]


def _leaves(value: Any, key: Key, replaced: dict[Key, BaseModel]) -> Iterator[tuple[Key, str]]:
    value = replaced.get(key, value)
    if isinstance(value, BaseModel):
        parts: list[tuple[str | int, Any]] = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, dict):
        parts = list(value.items())
    elif isinstance(value, list | tuple):
        parts = list(enumerate(value))
    else:
        yield key, _text(value)
        return
    if not parts and not isinstance(value, BaseModel) and key[-1] != "options":
        yield key, "[]" if isinstance(value, list | tuple) else "{}"
    for name, part in parts:
        yield from _leaves(part, (*key, name), replaced)


def _text(value: Any) -> str:
    if isinstance(value, SecretStr):
        return "********"
    return "unset" if value is None else json.dumps(value, ensure_ascii=False, default=str)


__all__ = ["Row", "explain"]
