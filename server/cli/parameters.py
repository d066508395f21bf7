"""Parameters that several commands share, and what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from engine.config.load import LoadedConfig
    from engine.registry import Registry

F = TypeVar("F", bound=Callable[..., Any])


def config_argument(function: F) -> F:
    """`[CONFIG]`: a YAML file, or nothing for the defaults."""
    return click.argument("config", required=False, type=click.Path(path_type=Path))(function)


def set_option(function: F) -> F:
    """`--set KEY=VALUE`, repeatable, as `overrides`."""
    return click.option(
        "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value, as in kv_cache.page_size=32."
    )(function)


def device_option(function: F) -> F:
    """`--device`, as `device`: a name or a path for `engine.device_profiles.load_profile`, or None."""
    return click.option(
        "--device", metavar="NAME|FILE", help="A known device (h200, a100, rtx4090, cpu, …) or a YAML file."
    )(function)


def json_option(function: F) -> F:
    """`--json`, as `as_json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")(function)


def loaded_with_registry(config: Path | None, overrides: Sequence[str]) -> tuple[LoadedConfig, Registry]:
    """The configuration, and the plugins that it lets in. Raises EngineError."""
    from engine.config.load import load_config
    from engine.registry import Registry

    loaded = load_config(config, overrides)
    return loaded, Registry.discover(loaded.config.plugins.allow, loaded.config.plugins.deny)


__all__ = ["config_argument", "device_option", "json_option", "loaded_with_registry", "set_option"]
