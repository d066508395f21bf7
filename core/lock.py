"""A lock: which distributions offer plugins, in which version and with which content, and what differs from it now.

Reads package metadata and hashes files; no plugin is imported, so what a lock refuses never runs. Plugins that the
configuration denies, or that are written for another hook API, are never loaded and so not locked.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from engine.content_hash import content_hash
from engine.discovery import Entry, State
from engine.errors import PluginError

FORMAT: Final = 1
"""The number in the key `lock` of the file."""

AGAIN: Final = "write the lock anew with `engine plugins lock`"


@dataclass(frozen=True, slots=True)
class Locked:
    """One distribution."""

    name: str
    version: str
    hash: str  # "sha256:" and 64 hex digits, see `engine.content_hash`
    plugins: tuple[str, ...]  # entry-point names, sorted


Lock = tuple[Locked, ...]
"""Sorted by name."""


def take(entries: Iterable[Entry]) -> Lock:
    """The lock of what is installed now, given the entries as `engine.discovery.discover` returns them.

    Raises:
        PluginError: a plugin belongs to no distribution that could be named.
    """
    plugins: dict[tuple[str, str], list[str]] = {}
    for entry in entries:
        if entry.state is State.FOUND:
            plugins.setdefault((entry.distribution, entry.version), []).append(entry.name)
    return tuple(
        Locked(name, version, content_hash(_distribution(name)), tuple(sorted(names)))
        for (name, version), names in sorted(plugins.items())
    )


def dump(lock: Lock) -> str:
    """The lock as the text of a file."""
    return json.dumps({"lock": FORMAT, "distributions": [asdict(each) for each in lock]}, indent=2) + "\n"


def load(path: Path) -> Lock:
    """The lock that a file holds.

    Raises:
        PluginError: the file can't be read or is no lock; the sentence names it.
    """
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or found.get("lock") != FORMAT:
            raise ValueError(f'it lacks "lock": {FORMAT}')
        return TypeAdapter(Lock).validate_python(found.get("distributions"))
    except OSError as error:
        raise PluginError(f"the lock {path} can't be read: {error.strerror}; {AGAIN}") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise PluginError(f"{path} is no lock: distributions{list(first['loc'])}: {first['msg']}; {AGAIN}") from None
    except ValueError as error:
        raise PluginError(
            f"{path} is no lock: {error}; {AGAIN}, and write the configuration first: engine serve CONFIG --locked LOCK"
        ) from None


def differences(lock: Lock, now: Lock) -> list[str]:
    """One sentence for each thing that is missing, other, or too much; empty when all is as locked."""
    wanted, found = ({each.name: each for each in one} for one in (lock, now))
    problems = []
    for name, want in wanted.items():
        if (have := found.get(name)) is None:
            problems.append(
                f"{name} {want.version} is locked, but none of its plugins ({', '.join(want.plugins)}) would load; "
                f"install it (pip install {name}=={want.version}), take it out of plugins.deny, or {AGAIN}"
            )
        elif have.version != want.version:
            problems.append(
                f"{name} is installed in version {have.version}, locked is {want.version}; "
                f"pip install {name}=={want.version}, or {AGAIN}"
            )
        elif have.hash != want.hash:
            problems.append(
                f"{name} {have.version} has other content ({_short(have.hash)}) than was locked ({_short(want.hash)}); "
                f"pip install --force-reinstall {name}=={want.version}, or {AGAIN}"
            )
    return problems + list(_surplus(wanted, now))


def _surplus(wanted: Mapping[str, Locked], now: Lock) -> Iterator[str]:
    for have in now:
        known = wanted[have.name].plugins if have.name in wanted else ()
        if more := [plugin for plugin in have.plugins if plugin not in known]:
            yield (
                f"{have.name} {have.version} brings what is not locked: {', '.join(more)}; "
                f"put that into plugins.deny, uninstall {have.name}, or {AGAIN}"
            )


def _short(digest: str) -> str:
    return f"{digest[:19]}…"


def _distribution(name: str) -> metadata.Distribution:
    try:
        return metadata.distribution(name)
    except metadata.PackageNotFoundError:
        raise PluginError(
            f"the plugins of {name} can't be locked, since no metadata say what was installed; reinstall it with pip"
        ) from None


__all__ = ["FORMAT", "Lock", "Locked", "differences", "dump", "load", "take"]
