"""The two pluggy markers and the number of the hook API.

Everything a plugin module needs at import time comes from here and from `engine.plugin`; neither imports torch.
"""

from __future__ import annotations

from typing import Final

import pluggy

PROJECT: Final = "engine"
"""Name of the pluggy project and of the entry-point group that plugins register under."""

API_GROUP: Final = "engine.api"
"""Entry-point group in which a distribution states the hook API it was written for: one line, `hooks = "v1"`."""

HOOK_API: Final = 1
"""The hook API of this engine. A plugin that states another number is refused before its code is imported."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

__all__ = ["API_GROUP", "HOOK_API", "PROJECT", "hookimpl", "hookspec"]
