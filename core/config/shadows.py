"""Names that an option of a component may not have, since something else goes by them where the option is written or
read: the keys of the section around it, and what pydantic's models have as attributes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine.config.model import (
    Component,
    ConnectorSection,
    KVCacheSection,
    SchedulerSection,
    Section,
    SpeculatorSection,
)
from engine.plugin import Options

_SECTIONS: Final[Mapping[str, type[Section]]] = {
    "kv_caches": KVCacheSection,
    "scheduling_policies": SchedulerSection,
    "speculators": SpeculatorSection,
    "kv_connectors": ConnectorSection,
}
"""Extension points whose section has keys beside `use` and `options`."""


def shadowed(point: str, options: type[Options]) -> str | None:
    """The first field of an options model that shadows something, with what that is; None is the rule."""
    section = _SECTIONS.get(point, Component)
    for name in options.model_fields:
        if name in section.model_fields:
            return f"{name!r}, which shadows the key {name!r} of the section that names the component"
        if hasattr(Options, name):
            return f"{name!r}, which shadows an attribute of pydantic's models"
    return None


__all__ = ["shadowed"]
