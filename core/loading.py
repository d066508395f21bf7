"""Importing one plugin at a time: whatever it raises or declares wrongly becomes its reason, and harms no other."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import replace
from enum import EnumType
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import pluggy

from engine import capabilities, deadline
from engine.capabilities import Capabilities
from engine.config.shadows import shadowed
from engine.deadline import within
from engine.deprecation import Ending, collected, ending
from engine.discovery import Entry, State, nearest
from engine.hooks import PROJECT
from engine.plugin import Offer, Options, WrapperOptions
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
            with collected() as endings:
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
            names: set[str] = set()
            for offer in offers:
                _check(_POINTS[caller.name], offer)
                if offer.name in names:
                    raise ValueError(f"{caller.name} offers the name {offer.name!r} twice; rename one of the two")
                names.add(offer.name)
                yield caller.name, offer


def _check(point: ModuleType, offer: Any) -> None:
    """Raise TypeError or ValueError when what a hook returned is no sound offer."""
    wanted: type[Offer[Any]] = getattr(point, "OFFER", Offer)
    if not isinstance(offer, wanted):
        raise TypeError(f"{point.HOOK} returned {type(offer).__name__}, expected {wanted.__name__}")
    if not isinstance(offer.name, str) or not offer.name or offer.name == "auto":
        raise ValueError(f"{point.HOOK} offers the name {offer.name!r}, expected a non-empty text other than 'auto'")
    _check_api(point, offer)
    if not (isinstance(offer.options, type) and issubclass(offer.options, Options)):
        raise TypeError(f"the options of {offer.name!r} must be a subclass of engine.plugin.Options")
    if offer.wraps and not issubclass(offer.options, WrapperOptions):
        raise TypeError(f"{offer.name!r} wraps, so its options must be a subclass of engine.plugin.WrapperOptions")
    if problem := shadowed(point.HOOK, offer.options):
        raise ValueError(f"the options of {offer.name!r} have a field {problem}; rename it")
    if not callable(offer.build):
        raise TypeError(f"the build of {offer.name!r} can't be called")
    if not isinstance(offer.capabilities, Capabilities):
        raise TypeError(f"the capabilities of {offer.name!r} must be an engine.plugin.Capabilities")
    if unknown := offer.requires.keys() - _POINTS:
        name = sorted(unknown)[0]
        raise ValueError(f"{offer.name!r} requires something of {name!r}, no extension point{nearest(name, _POINTS)}")


def _check_api(point: ModuleType, offer: Offer[Any]) -> None:
    """Raise ValueError for a number of the extension point that isn't spoken; warn of one that will end."""
    older: Mapping[int, Ending] = getattr(point, "ENDING", {})
    if old := older.get(offer.api):
        ending(old.what, ends=old.ends, instead=old.instead)
    elif offer.api != point.API:
        raise ValueError(
            f"{offer.name!r} is written for version {offer.api} of {point.HOOK}, this engine speaks {point.API}"
        )


def _reason(error: BaseException) -> str:
    """The error in one line, with the place that raised it when that lies in the plugin."""
    text = " ".join(f"{type(error).__name__}: {error}{_vocabulary(error)}".split())
    ours = {__file__, deadline.__file__, threading.__file__}
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
