"""Errors that people read: each says in one sentence what was asked, what there is and what to do.

Whoever faces the user prints the text without a traceback and ends with `exit_code`.
"""

from __future__ import annotations

from typing import ClassVar


class EngineError(Exception):
    """Base of every error that the user, not a programmer, can put right."""

    exit_code: ClassVar[int] = 1


class ConfigError(EngineError):
    """The configuration is wrong. Several problems stand on lines of their own."""

    exit_code = 2


class PluginError(EngineError):
    """What the configuration names is not installed or can't be used, or two plugins collide."""

    exit_code = 2


class CompositionError(EngineError):
    """The parts don't fit together, or don't fit the model or the device."""

    exit_code = 2


class ResourceError(EngineError):
    """Something outside the configuration is missing or unusable: a file, a device, memory."""

    exit_code = 3


__all__ = ["CompositionError", "ConfigError", "EngineError", "PluginError", "ResourceError"]
