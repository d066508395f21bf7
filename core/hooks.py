"""The two pluggy markers and the numbers of the hook API that are accepted.

Everything a plugin module needs at import time comes from here and from `engine.plugin`; neither imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pluggy

from engine.deprecation import Ending

PROJECT: Final = "engine"
"""Name of the pluggy project and of the entry-point group that plugins register under."""

API_GROUP: Final = "engine.api"
"""Entry-point group in which a distribution states the hook API it was written for: one line, `hooks = "v1"`."""

HOOK_API: Final = 1
"""The hook API of this engine. A plugin that states another number is refused before its code is imported."""

ENDING: Final[Mapping[int, Ending]] = {}
"""Older hook APIs that are accepted all the same, each with when it ends (docs/compatibility-policy.md)."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["API_GROUP", "ENDING", "HOOK_API", "PROJECT", "hookimpl", "hookspec"]
