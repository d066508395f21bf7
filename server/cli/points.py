"""Extension points as commands name them: by spec module (`kv_cache`) or by hook (`kv_caches`), with `-` or `_`."""

from __future__ import annotations

from types import ModuleType

from engine.discovery import nearest
from engine.errors import PluginError
from engine.specs import POINTS


def find_point(name: str) -> ModuleType:
    """The spec module that a user means.

    Raises:
        PluginError: there is none; the sentence lists what there is.
    """
    known = {spelling: point for point in POINTS for spelling in (point.HOOK, point.__name__.rpartition(".")[2])}
    wanted = name.strip().lower().replace("-", "_")
    if wanted in known:
        return known[wanted]
    names = [point.__name__.rpartition(".")[2] for point in POINTS]
    raise PluginError(f"there is no extension point {name!r}; there are {', '.join(names)}{nearest(wanted, known)}")


__all__ = ["find_point"]
