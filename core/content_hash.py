"""A digest of what a distribution installed, without importing any of it."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator
from importlib import metadata
from importlib.machinery import all_suffixes
from pathlib import Path

from engine.hooks import PROJECT


def content_hash(distribution: metadata.Distribution) -> str:
    """One digest over the names and bytes of the distribution's files, byte code and installer's notes left out.

    Files are those of its RECORD, and whatever Python would find in their stead or beside them: a package of the same
    name that stands earlier on the path, a module that was added later. An editable install has nothing of interest in
    its RECORD: its plugins' packages are read where they lie.
    """
    recorded = _recorded(distribution)
    files = recorded | _found(distribution, recorded)
    whole = hashlib.sha256((distribution.read_text("entry_points.txt") or "").encode())
    for name in sorted(files):
        content = files[name].read_bytes() if files[name].is_file() else b""
        whole.update(f"{name} {hashlib.sha256(content).hexdigest()}\n".encode())
    return f"sha256:{whole.hexdigest()}"


def _recorded(distribution: metadata.Distribution) -> dict[str, Path]:
    """Name -> place of what pip installed; nothing for an editable install or a bare source folder."""
    origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    if origin.get("dir_info", {}).get("editable") or distribution.read_text("RECORD") is None:
        return {}
    return {
        str(file): Path(str(file.locate()))
        for file in distribution.files or ()
        if not {"..", "__pycache__"} & set(file.parts) and not file.parts[0].endswith(".dist-info")
    }


def _found(distribution: metadata.Distribution, recorded: Collection[str]) -> dict[str, Path]:
    """Name -> place of every file in the packages that lead to the distribution's entry points, or are recorded.

    Where there is a record, a file that it lacks counts only if Python could import it: plugins may write others.
    """
    modules = {point.module for point in distribution.entry_points.select(group=PROJECT)}
    modules |= {Path(name).parts[0].partition(".")[0] for name in recorded if name.endswith(".py")}
    files: dict[str, Path] = {}
    for name, place in (found for module in sorted(modules) for found in _places(module)):
        if place.is_file():
            files[f"{name}.py"] = place
        else:
            inside = (path for path in place.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
            files |= {f"{name}/{path.relative_to(place)}": path for path in inside}
    return {name: place for name, place in files.items() if not recorded or name in recorded or _importable(name)}


def _importable(name: str) -> bool:
    return name.endswith(tuple(all_suffixes()))


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


__all__ = ["content_hash"]
