"""What the installed plugins offer.

A registry is a value made from entry points (or, in tests, from plugin objects). Reading metadata costs milliseconds;
plugin modules are imported when the first offer is asked for. A plugin that fails is kept with the reason, and is an
error only for whoever asks for it by name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

from engine.building import Source, built
from engine.discovery import Entry, State, discover, nearest
from engine.errors import PluginError
from engine.hooks import HOOK_API
from engine.loading import IMPORT_SECONDS, Loader
from engine.plugin import Offer, Options
from engine.specs import POINTS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Owned(Generic[T]):
    """An offer and the entry point it came through."""

    offer: Offer[T]
    entry: Entry
    point: str  # the extension point's hook

    def build(self, options: Options, **context: Any) -> T:
        """Make the component; raises as `engine.building.built` does."""
        source = Source(self.point, self.offer.name, self.entry.owner, self.entry.name)
        return built(source, lambda: self.offer.build(options, **context))


class UnknownComponent(PluginError):
    """No installed plugin offers this name."""


class BrokenPlugin(PluginError):
    """The plugin that was asked for is installed but can't be used."""


class Registry:
    """The plugins of this process. Loading happens once, on the first question about offers."""

    def __init__(self, entries: Sequence[Entry], seconds: float = IMPORT_SECONDS) -> None:
        self._seconds = seconds  # that one plugin may keep us waiting
        self.entries = tuple(entries)
        """Every entry point as the metadata describe it; `load` says what importing made of them."""

    @classmethod
    def discover(cls, allow: Collection[str] | None = None, deny: Collection[str] = ()) -> Registry:
        """Read the installed entry points; imports no plugin. Raises as `engine.discovery.discover` does."""
        return cls(discover(allow, deny))

    @classmethod
    def of(cls, plugins: Mapping[str, object], distribution: str = "given") -> Registry:
        """A registry of plugin objects (modules, or anything with hook implementations) under the given names."""
        return cls(
            [
                Entry(name=name, distribution=distribution, version="0", api=HOOK_API, load=lambda it=plugin: it)  # type: ignore[misc]
                for name, plugin in plugins.items()
            ]
        )

    def load(self) -> tuple[Entry, ...]:
        """Import what may be imported; the entries with the state each has come to.

        Raises:
            PluginError: two plugins offer one name at one extension point.
        """
        return self._loaded[0]

    def offers(self, point: str) -> tuple[Owned[Any], ...]:
        """Every usable offer of an extension point (its hook's name), sorted by name. Raises as `load` does."""
        return tuple(self._loaded[1][point].values())

    def get(self, point: str, name: str) -> Owned[Any]:
        """The offer of that name.

        Raises:
            UnknownComponent: nobody offers it; the sentence lists what is installed.
            BrokenPlugin: a plugin of that name is installed but failed, is refused or is denied.
        """
        offers = self._loaded[1][point]
        if name in offers:
            return offers[name]
        failed = [e for e in self.load() if e.state is not State.OK]
        for entry in failed:
            if name in (entry.name, entry.name.rpartition(".")[2]):
                raise BrokenPlugin(f"{noun(point)} {name!r} can't be used: {_complaint(entry)}")
        installed = ", ".join(offers) or "none at all"
        raise UnknownComponent(
            f"no {noun(point)} named {name!r}; installed: {installed}{nearest(name, offers)}{_suspects(failed)}"
        )

    @cached_property
    def _loaded(self) -> tuple[tuple[Entry, ...], dict[str, dict[str, Owned[Any]]]]:
        loader = Loader(self._seconds)
        entries: list[Entry] = []
        offers: dict[str, dict[str, Owned[Any]]] = {point.HOOK: {} for point in POINTS}
        for entry in self.entries:
            if entry.state is State.FOUND:
                entry, found = loader.load(entry)
                for point, offer in found:
                    _add(offers[point], noun(point), Owned(offer, entry, point))
            entries.append(entry)
        return tuple(entries), {point: dict(sorted(named.items())) for point, named in offers.items()}


def noun(point: str) -> str:
    """What one component of an extension point is called in a sentence: `kv_caches` -> `KV cache`."""
    words = point.replace("_", " ").replace("kv ", "KV ").replace("cli ", "CLI ")
    return words.removesuffix("ies") + "y" if words.endswith("ies") else words.removesuffix("s")


def _complaint(entry: Entry) -> str:
    said = f"the plugin {entry.name!r} of {entry.owner} is {entry.state}: {entry.reason}"
    remedy = f"; upgrade {entry.distribution}, or uninstall it" if entry.state is State.BROKEN else ""
    return said + remedy


def _suspects(failed: Sequence[Entry]) -> str:
    """A hint at plugins that may offer what nobody else does, were they usable."""
    unusable = [e for e in failed if e.state is not State.DENIED]
    if len(unusable) == 1:
        return f" (and {_complaint(unusable[0])})"
    return f" ({len(unusable)} plugins are unusable: see `engine plugins list`)" if unusable else ""


def _add(named: dict[str, Owned[Any]], what: str, new: Owned[Any]) -> None:
    first = named.setdefault(new.offer.name, new)
    if first is not new and first.entry.owner == new.entry.owner:
        raise PluginError(
            f"the {what} {new.offer.name!r} is offered twice by {new.entry.owner}: by its entry points "
            f"{first.entry.name} and {new.entry.name}; put one of the two into plugins.deny or upgrade the package"
        )
    if first is not new:
        raise PluginError(
            f"the {what} {new.offer.name!r} is offered by {first.entry.owner} ({first.entry.name}) "
            f"and by {new.entry.owner} ({new.entry.name}); put one of the two into plugins.deny or uninstall it"
        )


__all__ = ["BrokenPlugin", "Owned", "Registry", "UnknownComponent", "noun"]
