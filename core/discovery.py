"""Which plugins are installed: entry points and their owners, read from package metadata; no plugin is imported."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from importlib import metadata

from engine.errors import PluginError
from engine.hooks import API_GROUP, ENDING, HOOK_API, PROJECT


class State(StrEnum):
    """What has become of an entry point."""

    FOUND = "found"  # installed, not imported yet
    OK = "ok"
    DENIED = "denied"  # the configuration keeps it out
    REFUSED = "refused"  # written for another hook API; its code is never imported
    BROKEN = "broken"  # raised on import, or declares something malformed


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry point of the group `engine`."""

    name: str
    distribution: str
    version: str
    api: int | None  # hook API the distribution was written for
    load: Callable[[], object] = field(repr=False, compare=False)
    state: State = State.FOUND
    reason: str = ""  # why it is denied, refused or broken
    warnings: tuple[str, ...] = ()  # what it uses of the contract that will end

    @property
    def owner(self) -> str:
        """Distribution and version, for sentences."""
        return f"{self.distribution} {self.version}"


def discover(allow: Collection[str] | None = None, deny: Collection[str] = ()) -> tuple[Entry, ...]:
    """The installed entry points, sorted by name, each found, denied or refused. Imports no plugin.

    Args:
        allow: names that may load; None is all of them.
        deny: names that may not.

    Raises:
        PluginError: two distributions own one name, or `allow` or `deny` name what is not installed.
    """
    entries = [_judged(entry, allow, deny) for entry in sorted(_installed(), key=lambda e: e.name)]
    names = {entry.name for entry in entries}
    for key, wanted in (("allow", allow or ()), ("deny", deny)):
        for name in wanted:
            if name not in names:
                raise PluginError(
                    f"plugins.{key} names {name!r}, but no such plugin is installed{nearest(name, names)}"
                )
    refuse_clashes(entries)
    return tuple(entries)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when a known name is close to `name`, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def refuse_clashes(entries: Sequence[Entry]) -> None:
    """Raise PluginError when two of the entries that may load have one name."""
    owners: dict[str, Entry] = {}
    for entry in entries:
        if entry.state is not State.DENIED and (first := owners.setdefault(entry.name, entry)) is not entry:
            raise PluginError(
                f"the plugin name {entry.name!r} is claimed by {first.owner} and by {entry.owner}; "
                "uninstall one of them, or put the name into plugins.deny"
            )


def _installed() -> Iterator[Entry]:
    stated: dict[str, str | None] = {}
    for point in metadata.entry_points(group=PROJECT):
        owner = point.dist
        distribution = (owner and owner.name) or "an unnamed distribution"
        if distribution not in stated:
            stated[distribution] = _stated_api(owner) if owner else None
        yield _entry(point, distribution, (owner and owner.version) or "(no version)", stated[distribution])


def _stated_api(owner: metadata.Distribution) -> str | None:
    return next((line.value for line in owner.entry_points.select(group=API_GROUP, name="hooks")), None)


def _entry(point: metadata.EntryPoint, distribution: str, version: str, stated: str | None) -> Entry:
    number = re.fullmatch(r"v([0-9]+)", stated or "")
    entry = Entry(
        name=point.name,
        distribution=distribution,
        version=version,
        api=int(number[1]) if number else None,
        load=point.load,
    )
    if entry.api == HOOK_API:
        return entry
    if entry.api is not None and (end := ENDING.get(entry.api)):
        return replace(entry, warnings=(end.used_by(entry.owner, entry.name),))
    said = f"is written for hook API {stated}" if stated else "does not say which hook API it is written for"
    spoken = " and ".join(f"v{number}" for number in sorted({*ENDING, HOOK_API}))
    wanted = f'this engine speaks {spoken}, stated by hooks = "v{HOOK_API}" in the entry-point group {API_GROUP!r}'
    newer = entry.api is not None and entry.api > HOOK_API
    remedy = "upgrade the engine" if newer else f"upgrade {distribution}"
    reason = f"{distribution} {said}; {wanted}; {remedy}, or uninstall {distribution}"
    return replace(entry, state=State.REFUSED, reason=reason)


def _judged(entry: Entry, allow: Collection[str] | None, deny: Collection[str]) -> Entry:
    if entry.name in deny:
        return replace(entry, state=State.DENIED, reason="plugins.deny names it")
    if allow is not None and entry.name not in allow:
        return replace(entry, state=State.DENIED, reason="plugins.allow does not name it")
    return entry


__all__ = ["Entry", "State", "discover", "nearest", "refuse_clashes"]
