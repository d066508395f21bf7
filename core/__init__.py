"""engine: LLM inference in which every part is a plugin.

The public face, loaded lazily so that importing it costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.hooks import hookimpl
    from engine.llm import LLM
    from engine.llm_async import AsyncLLM
    from engine.sampling_params import SamplingParams, Speculation
    from engine.structured import Structured

__version__ = "0.1.0"

_HOMES = {
    "AsyncLLM": "engine.llm_async",
    "LLM": "engine.llm",
    "SamplingParams": "engine.sampling_params",
    "Speculation": "engine.sampling_params",
    "Structured": "engine.structured",
    "hookimpl": "engine.hooks",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


__all__ = ["LLM", "AsyncLLM", "SamplingParams", "Speculation", "Structured", "__version__", "hookimpl"]
