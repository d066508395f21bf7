"""A new plugin package: templates, one folder for each extension point, and the values that are put into them.

A template is a file with `$name` and the like in the place of names (`string.Template`). What a folder holds becomes
the package's module, but for `test.py` and `engine.yaml`, which are put where they belong.
"""

from __future__ import annotations

import keyword
import re
import sys
from dataclasses import dataclass
from importlib import metadata, resources
from importlib.resources.abc import Traversable
from importlib.util import find_spec
from pathlib import Path
from string import Template
from types import ModuleType
from typing import Final

from engine.errors import PluginError
from engine.hooks import HOOK_API
from engine.registry import noun

_NAME: Final = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_RESERVED: Final = frozenset({"auto", "none", "engine", "test", "tests"})
_PLACES: Final = {"test.py": "tests/test_$module.py", "engine.yaml": "engine.yaml"}
_USES: Final = {
    "cli_commands": "engine $name README.md",
    "model_sources": "engine serve engine.yaml   # once the file names a model",
    "models": "engine serve engine.yaml   # once the file names a model",
    "weight_loaders": "engine serve engine.yaml   # once the file names a model",
}


@dataclass(frozen=True, slots=True)
class Scaffold:
    """A package that could be written: path within its folder -> text."""

    name: str
    files: dict[str, str]

    def write(self, folder: Path) -> None:
        """Write the package into a folder that doesn't exist yet.

        Raises:
            PluginError: it exists, or can't be made; the sentence names it.
        """
        if folder.exists():
            raise PluginError(f"{folder} exists already; take another name, or another place with --dir")
        try:
            for path, text in self.files.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PluginError(f"{folder} can't be written: {error.strerror}") from None


def scaffold(point: ModuleType, name: str) -> Scaffold:
    """The package of a plugin called `name` at an extension point (a module of `engine.specs`).

    Raises:
        PluginError: the name can't be one of a distribution, a component and a module at once.
    """
    check_name(name)
    short = point.__name__.rpartition(".")[2]
    what = noun(point.HOOK)
    values = {
        "name": name,
        "module": name.replace("-", "_"),
        "title": "".join(word.capitalize() for word in name.split("-")),
        "point": short,
        "noun": what,
        "article": "An" if what[0] in "aeiou" else "A",
        "hook_api": str(HOOK_API),
        "use": Template(_USES.get(point.HOOK, "engine serve engine.yaml")).substitute(name=name),
    }
    templates = resources.files("engine.scaffold") / "templates"
    files: dict[str, str] = {}
    for template in _sorted(templates / short):
        file = template.name.removesuffix(".tmpl")
        place = _PLACES.get(file, f"$module/{file}")
        files[_filled(place, values)] = _filled(template.read_text(encoding="utf-8"), values)
    values["implementation"] = next(
        Path(path).name for path in files if Path(path).parent.name == values["module"] and "__init__" not in path
    )
    for template in _sorted(templates / "package"):
        files[template.name.removesuffix(".tmpl")] = _filled(template.read_text(encoding="utf-8"), values)
    return Scaffold(name, files)


def check_name(name: str) -> None:
    """Raise PluginError unless a package, a module and a component can all have this name."""
    if not _NAME.fullmatch(name):
        near = "-".join(re.findall(r"[a-z0-9]+", name.lower())).lstrip("-0123456789")
        hint = f", such as {near!r}" if near and _NAME.fullmatch(near) else ""
        raise PluginError(f"{name!r} is no name for a plugin: take lower-case letters, digits and hyphens{hint}")
    module = name.replace("-", "_")
    if name in _RESERVED or keyword.iskeyword(module) or module in sys.stdlib_module_names:
        raise PluginError(f"{name!r} is taken by Python or by engine itself; take another name, such as 'my-{name}'")
    if _installed(name, module):
        raise PluginError(
            f"a package {name!r} is installed, which this one would replace; take another name, such as 'my-{name}'"
        )


def _installed(name: str, module: str) -> bool:
    """Whether pip or Python know something else by that name."""
    spec = find_spec(module)
    return (spec is not None and spec.origin is not None) or any(metadata.distributions(name=name))


def _sorted(folder: Traversable) -> list[Traversable]:
    return sorted((each for each in folder.iterdir() if each.name.endswith(".tmpl")), key=lambda each: each.name)


def _filled(text: str, values: dict[str, str]) -> str:
    return Template(text).substitute(values)


__all__ = ["Scaffold", "check_name", "scaffold"]
