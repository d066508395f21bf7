"""A YAML file and `--set` values -> the validated configuration, and where each value came from."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from engine.config.model import EngineConfig
from engine.config.origins import Origins
from engine.config.overrides import apply
from engine.config.problems import validated
from engine.config.source import read
from engine.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """A configuration with a memory of who wrote what."""

    config: EngineConfig
    origins: Origins
    path: Path | None  # None: no file, defaults and overrides only


def load_config(
    path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> LoadedConfig:
    """Read, override, expand secrets, validate.

    The components' own options are not looked at here: `engine.config.components.check` and `compose` validate them,
    since that takes the plugins.

    Args:
        path: the YAML file; None means an empty one.
        overrides: `KEY=VALUE` each, later ones win.
        environ: where `${NAME}` of secrets is looked up; this process's environment if unset.

    Raises:
        ConfigError: one line per problem, each with file and line, key, value and what was expected.
    """
    config, origins = load_tree(EngineConfig, path, overrides, environ)
    return LoadedConfig(config, origins, path)


def load_tree(
    model: type[M], path: Path | None, overrides: Sequence[str] = (), environ: Mapping[str, str] | None = None
) -> tuple[M, Origins]:
    """The same for a tree of another shape; see `load_config`."""
    data, written = ({}, {}) if path is None else read(path)
    if not isinstance(data, dict):
        example = next(iter(model.model_fields))
        raise ConfigError(f"{path}:1: expected a mapping of sections such as `{example}:`, found {type(data).__name__}")
    for override in overrides:
        apply(data, written, override)
    origins = Origins(written)
    return validated(model, data, origins, (), os.environ if environ is None else environ), origins


__all__ = ["LoadedConfig", "load_config", "load_tree"]
