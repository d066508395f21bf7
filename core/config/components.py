"""Where the tree names components, and the second pass over it: names are looked up, options validated by their owner.

Composition does the same for the parts it chooses; here it is done without a model, for `engine config check`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.config.load import LoadedConfig
from engine.config.model import EngineConfig
from engine.config.origins import Key, Origins, dotted
from engine.config.problems import validated
from engine.errors import ConfigError, EngineError
from engine.plugin import Inner, Offer, Options
from engine.registry import Registry

PLACES: Final[Mapping[Key, str]] = {
    ("model", "implementation"): "models",
    ("model", "loader"): "weight_loaders",
    ("attention",): "attention_backends",
    ("kv_cache",): "kv_caches",
    ("quantization",): "quantizations",
    ("speculator",): "speculators",
    ("kv_connectors",): "kv_connectors",
    ("scheduler",): "scheduling_policies",
    ("executor",): "executors",
    ("grammar",): "grammars",
    ("observers",): "observers",
    ("parsers", "tools"): "tool_parsers",
    ("parsers", "reasoning"): "reasoning_parsers",
    ("server", "rate_limit"): "rate_limits",
}
"""Key of a section (or of a list of sections) -> extension point of the component it names."""

OPTIONAL: Final = frozenset({"speculators", "grammars", "tool_parsers", "reasoning_parsers"})
"""Extension points where `none` means that there is no such component."""


@dataclass(frozen=True, slots=True)
class Named:
    """One component as the tree names it."""

    key: Key
    point: str
    use: str
    options: Mapping[str, Any]
    by_default: bool  # nobody wrote the name

    @property
    def chosen(self) -> bool:
        """Whether a certain component is named: neither `auto` nor `none` where that means absence."""
        return self.use != "auto" and not self.absent

    @property
    def absent(self) -> bool:
        """Whether the tree says that there shall be none."""
        return self.use == "none" and self.point in OPTIONAL


def named(config: EngineConfig) -> Iterator[Named]:
    """Every component that the tree names, in the order of `PLACES`."""
    for key, point in PLACES.items():
        section: Any = config
        for part in key:
            section = getattr(section, str(part))
        items = [((*key, i), s) for i, s in enumerate(section)] if isinstance(section, list) else [(key, section)]
        for place, item in items:
            yield Named(place, point, item.use, item.options, "use" not in item.model_fields_set)


def validated_options(
    offer: Offer[Any], options: Mapping[str, Any], origins: Origins, at: Key, environ: Mapping[str, str] | None = None
) -> Options:
    """The component's own section (of the component at `at`), validated by the model that it ships.

    Raises:
        ConfigError: as `load_config` does.
    """
    environment = os.environ if environ is None else environ
    return validated(offer.options, dict(options), origins, (*at, "options"), environment)


def wrapped(component: Named, options: Options) -> Named:
    """The component inside a wrapping one, whose validated options are given."""
    inner: Inner = options.inner  # type: ignore[attr-defined]  # `Offer.wraps` promises it; loading checks
    key = (*component.key, "options", "inner")
    return Named(key, component.point, inner.use, inner.options, "use" not in inner.model_fields_set)


def refuse_orphans(component: Named, origins: Origins) -> None:
    """Raise ConfigError when options are given but no component is named that could take them."""
    if component.options and not component.chosen:
        at = (*component.key, "options")
        raise ConfigError(
            f"{origins.near(at)}{dotted(at)} is given while {dotted(component.key)}.use is {component.use}; "
            "name the component that the options are for"
        )


def check(loaded: LoadedConfig, registry: Registry) -> None:
    """Look up every component that the configuration names, and validate its options.

    Raises:
        ConfigError: one line per problem.
        PluginError: two plugins offer one name at one extension point, whatever the configuration says.
    """
    registry.load()
    problems: list[str] = []
    for component in named(loaded.config):
        try:
            _check_one(component, loaded, registry)
        except ConfigError as error:
            problems.append(str(error))
    for index, route in enumerate(loaded.config.server.routes):
        try:
            registry.get("server_routes", route)
        except EngineError as error:
            problems.append(f"{loaded.origins.near(('server', 'routes', index))}server.routes.{index}: {error}")
    if problems:
        raise ConfigError("\n".join(problems))


def _check_one(component: Named, loaded: LoadedConfig, registry: Registry) -> None:
    """Also what it wraps, and what that wraps."""
    refuse_orphans(component, loaded.origins)
    if component.chosen:
        offer = located(registry, component, loaded.origins)
        options = validated_options(offer, component.options, loaded.origins, component.key)
        if offer.wraps:
            _check_one(wrapped(component, options), loaded, registry)


def located(registry: Registry, component: Named, origins: Origins) -> Offer[Any]:
    """The offer that a component names; what the registry raises becomes a ConfigError with file and line."""
    try:
        return registry.get(component.point, component.use).offer
    except EngineError as error:
        key = (*component.key, "use")
        raise ConfigError(f"{origins.near(key)}{dotted(component.key)}: {error}") from None


__all__ = ["OPTIONAL", "PLACES", "Named", "check", "located", "named", "refuse_orphans", "validated_options", "wrapped"]
