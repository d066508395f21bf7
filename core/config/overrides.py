"""`--set a.b=c`: values from the command line, laid over those of the file."""

from __future__ import annotations

from typing import Any

from engine.config.origins import Key, Origin
from engine.config.source import parse
from engine.errors import ConfigError


def apply(data: dict[str, Any], origins: dict[Key, Origin], override: str) -> None:
    """Lay one `KEY=VALUE` over `data` and `origins`, in place.

    KEY is dotted; a number counts into a list, and the number after the last item appends. VALUE is YAML.

    Raises:
        ConfigError: no `=`, an empty part, an index out of the list, or a value that is not YAML.
    """
    path, equals, text = override.partition("=")
    parts = path.strip().split(".")
    if not equals or not all(parts):
        raise ConfigError(f"--set {path}: expected KEY=VALUE, such as --set kv_cache.page_size=32")
    label = f"--set {path.strip()}"  # without the value, which may be a secret
    value, written = parse(text, lambda line: label)
    key = _place(data, origins, parts, value, label)
    for stale in [k for k in origins if k[: len(key)] == key]:
        del origins[stale]
    origins[key] = Origin(label, leaf=True)
    origins.update({key + below: origin for below, origin in written.items()})


def _place(data: dict[str, Any], origins: dict[Key, Origin], parts: list[str], value: Any, label: str) -> Key:
    """Put `value` where `parts` lead, making mappings on the way; returns the place as a key."""
    here: Any = data
    key: Key = ()
    for position, part in enumerate(parts):
        step = _step(here, part, label)
        key = (*key, step)
        if position == len(parts) - 1:
            _store(here, step, value)
            break
        below = _get(here, step)
        if isinstance(below, str):  # `attention: cpu` is short for `attention: {use: cpu}`
            origins[*key, "use"] = Origin(origins[key].text, leaf=True)
            below = {"use": below}
        if below is None:
            below = [] if parts[position + 1].isdecimal() else {}
        if not isinstance(below, dict | list):
            raise ConfigError(f"{label}: {'.'.join(parts[: position + 1])} is {below!r}, which has no parts")
        _store(here, step, below)
        origins[key] = Origin(origins[key].text if key in origins else label, leaf=False)
        here = below
    return key


def _step(here: dict[str, Any] | list[Any], part: str, label: str) -> str | int:
    if isinstance(here, dict):
        return part
    if not part.isdecimal() or int(part) > len(here):
        raise ConfigError(f"{label}: {part!r} must be a number from 0 to {len(here)}, a place in the list")
    return int(part)


def _get(here: Any, step: str | int) -> Any:
    if isinstance(here, list):
        return here[int(step)] if step != len(here) else None
    return here.get(step)


def _store(here: Any, step: str | int, value: Any) -> None:
    if isinstance(here, list) and step == len(here):
        here.append(value)
    else:
        here[step] = value


__all__ = ["apply"]
