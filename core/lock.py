"""A lock: which distributions offer plugins, in which version and with which content, and what differs from it now.

Reads package metadata and hashes files; no plugin is imported, so what a lock refuses never runs. Plugins that the
configuration denies, or that are written for another hook API, are never loaded and so not locked.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter, ValidationError

from engine.discovery import Entry, State
from engine.errors import PluginError
from engine.hooks import PROJECT

FORMAT: Final = 1
"""The number in the key `lock` of the file."""

AGAIN: Final = "write the lock anew with `engine plugins lock`"


@dataclass(frozen=True, slots=True)
class Locked:
    """One distribution."""

    name: str
    version: str
    hash: str  # "sha256:" and 64 hex digits, see `content_hash`
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


def content_hash(distribution: metadata.Distribution) -> str:
    """One digest over the names and bytes of the distribution's files, byte code and installer's notes left out.

    Files are those of its RECORD. An editable install has none of interest there: its plugins' packages are read where
    they lie.
    """
    files = _recorded(distribution) or _found(distribution)
    whole = hashlib.sha256((distribution.read_text("entry_points.txt") or "").encode())
    for name in sorted(files):
        content = files[name].read_bytes() if files[name].is_file() else b""
        whole.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return f"sha256:{whole.hexdigest()}"


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


def _recorded(distribution: metadata.Distribution) -> dict[str, Path]:
    """Name -> place of what pip installed; nothing for an editable install or a bare source folder."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") or distribution.read_text("RECORD") is None:
        return {}
    return {
        str(file): Path(str(file.locate()))
        for file in distribution.files or ()
        if ".." not in file.parts and file.suffix != ".pyc" and not file.parts[0].endswith(".dist-info")
    }


def _found(distribution: metadata.Distribution) -> dict[str, Path]:
    """Name -> place of every file in the packages that lead to the distribution's entry points."""
    files: dict[str, Path] = {}
    for point in distribution.entry_points.select(group=PROJECT):
        for name, place in _places(point.module):
            if place.is_file():
                files[f"{name}.py"] = place
            else:
                inside = (path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
                files |= {f"{name}/{path.relative_to(place)}": path for path in inside}
    return files


def _places(module: str) -> Iterator[tuple[str, Path]]:
    """The folders of the packages above a module, or its own file, each under its name; nothing is imported.

    A folder that has no `__init__.py` is a namespace, which others may share: only what lies on the way is taken.
    """
    done: list[str] = []
    path: list[str] | None = None
    for part in module.split("."):
        done.append(part)
        here = [Path(folder) / part for folder in path or ()]
        if not any(place.is_dir() or place.with_suffix(".py").is_file() for place in here):
            here = _mapped(".".join(done), path)  # the top, or a package that an editable install keeps elsewhere
        for place in here:
            if (place / "__init__.py").is_file():
                yield "/".join(done), place
            elif place.with_suffix(".py").is_file():
                yield "/".join(done), place.with_suffix(".py")
        path = [str(place) for place in here]


def _mapped(name: str, path: list[str] | None) -> list[Path]:
    """Where the finders of `sys.meta_path` have a package (its folders) or a module (its file without the suffix)."""
    found = (finder.find_spec(name, path) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    if (spec := next(filter(None, found), None)) is None:
        return []
    if spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    return [Path(spec.origin).with_suffix("")] if spec.origin else []


__all__ = ["FORMAT", "Lock", "Locked", "content_hash", "differences", "dump", "load", "take"]
