"""Importing one plugin at a time: whatever it raises or declares wrongly becomes its reason, and harms no other."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from enum import EnumType
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pluggy

from engine import capabilities, deadline, soundness
from engine.capabilities import Capabilities
from engine.deadline import within
from engine.deprecation import collected
from engine.discovery import Entry, State
from engine.hooks import PROJECT
from engine.plugin import Offer
from engine.specs import POINTS

_POINTS: Mapping[str, ModuleType] = {point.HOOK: point for point in POINTS}

IMPORT_SECONDS: Final = 30.0
"""How long importing one plugin may take, and its offers. Both are meant to take milliseconds."""


class Loader:
    """One plugin manager that knows every extension point. `seconds` is how long one plugin may keep it waiting."""

    def __init__(self, seconds: float = IMPORT_SECONDS) -> None:
        self._seconds = seconds
        self._manager = pluggy.PluginManager(PROJECT)
        for point in POINTS:
            self._manager.add_hookspecs(point)

    def load(self, entry: Entry) -> tuple[Entry, list[tuple[str, Offer[Any]]]]:
        """Import one entry point and collect its offers, each with the hook it came from; none if it is broken."""
        plugin: object | None = None
        try:
            # What a plugin prints is no part of our output, which may be JSON.
            with redirect_stdout(sys.stderr), collected() as endings:
                plugin = self._fresh(entry)
                self._manager.register(plugin, name=entry.name)
                self._manager.check_pending()  # or else a misspelt hook would pass unseen
                offers = within(self._seconds, lambda: list(self._collect(plugin)))
        except (Exception, SystemExit) as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            return replace(entry, state=State.BROKEN, reason=_reason(error)), []
        told = [one.used_by(entry.owner, entry.name) for one in endings]
        return replace(entry, state=State.OK, warnings=(*entry.warnings, *told)), offers

    def _fresh(self, entry: Entry) -> object:
        plugin = within(self._seconds, entry.load)
        if self._manager.is_registered(plugin):
            raise ValueError(f"it is the same object as the plugin {self._manager.get_name(plugin)!r}")
        return plugin

    def _collect(self, plugin: object) -> Iterator[tuple[str, Offer[Any]]]:
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            raise ValueError("it implements no hook of the engine")
        for caller in callers:
            (implementation,) = (i for i in caller.get_hookimpls() if i.plugin is plugin)
            offers: Any = implementation.function()
            if not isinstance(offers, Iterable):
                raise TypeError(f"{caller.name} returned {type(offers).__name__}, expected a list of offers")
            names: set[str] = set()
            for offer in offers:
                soundness.require_sound(_POINTS[caller.name], offer)
                if offer.name in names:
                    raise ValueError(f"{caller.name} offers the name {offer.name!r} twice; rename one of the two")
                names.add(offer.name)
                yield caller.name, offer


def _reason(error: BaseException) -> str:
    """The error in one line, with the place that raised it when that lies in the plugin."""
    text = " ".join(f"{type(error).__name__}: {error}{_vocabulary(error)}".split())
    ours = {__file__, deadline.__file__, soundness.__file__, threading.__file__}
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours]
    own = [f for f in frames if "importlib" not in f.filename and "pluggy" not in f.filename]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


def _vocabulary(error: BaseException) -> str:
    """What there is, for a word that `engine.capabilities` lacks: Python itself only says that there is none."""
    words = getattr(error, "obj", None)
    if isinstance(error, AttributeError) and isinstance(words, EnumType) and words.__module__ == capabilities.__name__:
        return f"; not of the vocabulary of this engine, which knows {', '.join(words.__members__)}"
    if isinstance(error, TypeError) and str(error).startswith(f"{Capabilities.__name__}.__init__()"):
        known = ", ".join(Capabilities.__dataclass_fields__)
        return f"; not of the vocabulary of this engine, which knows {known}"
    return ""


__all__ = ["IMPORT_SECONDS", "Loader"]
