"""Importing one plugin at a time: whatever it raises or declares wrongly becomes its reason, and harms no other."""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pluggy

from engine.discovery import Entry, State
from engine.hooks import PROJECT
from engine.plugin import Offer, Options
from engine.specs import POINTS

_POINTS: Mapping[str, ModuleType] = {point.HOOK: point for point in POINTS}


class Loader:
    """One plugin manager that knows every extension point."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        for point in POINTS:
            self._manager.add_hookspecs(point)

    def load(self, entry: Entry) -> tuple[Entry, list[tuple[str, Offer[Any]]]]:
        """Import one entry point and collect its offers, each with the hook it came from; none if it is broken."""
        plugin: object | None = None
        try:
            plugin = self._fresh(entry)
            self._manager.register(plugin, name=entry.name)
            self._manager.check_pending()  # or else a misspelt hook would pass unseen
            offers = list(self._collect(plugin))
        except (Exception, SystemExit) as error:
            if self._manager.is_registered(plugin):
                self._manager.unregister(plugin)
            return replace(entry, state=State.BROKEN, reason=_reason(error)), []
        return replace(entry, state=State.OK), offers

    def _fresh(self, entry: Entry) -> object:
        plugin = entry.load()
        if self._manager.is_registered(plugin):
            raise ValueError(f"it is the same object as the plugin {self._manager.get_name(plugin)!r}")
        return plugin

    def _collect(self, plugin: object) -> Iterable[tuple[str, Offer[Any]]]:
        callers = self._manager.get_hookcallers(plugin) or []
        if not callers:
            raise ValueError("it implements no hook of the engine")
        for caller in callers:
            (implementation,) = (i for i in caller.get_hookimpls() if i.plugin is plugin)
            offers: Any = implementation.function()
            for offer in offers:
                _check(_POINTS[caller.name], offer)
                yield caller.name, offer


def _check(point: ModuleType, offer: Any) -> None:
    """Raise TypeError or ValueError when what a hook returned is no sound offer."""
    wanted: type[Offer[Any]] = getattr(point, "OFFER", Offer)
    if not isinstance(offer, wanted):
        raise TypeError(f"{point.HOOK} returned {type(offer).__name__}, expected {wanted.__name__}")
    if not isinstance(offer.name, str) or not offer.name or offer.name == "auto":
        raise ValueError(f"{point.HOOK} offers the name {offer.name!r}, expected a non-empty text other than 'auto'")
    if offer.api != point.API:
        raise ValueError(
            f"{offer.name!r} is written for version {offer.api} of {point.HOOK}, this engine speaks {point.API}"
        )
    if not (isinstance(offer.options, type) and issubclass(offer.options, Options)):
        raise TypeError(f"the options of {offer.name!r} must be a subclass of engine.plugin.Options")
    if not callable(offer.build):
        raise TypeError(f"the build of {offer.name!r} can't be called")


def _reason(error: BaseException) -> str:
    """The error in one line, with the place that raised it when that lies in the plugin."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__]
    own = [f for f in frames if "importlib" not in f.filename and "pluggy" not in f.filename]
    return f"{text} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else text


__all__ = ["Loader"]
