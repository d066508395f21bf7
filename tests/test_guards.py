"""Rules of the project that no single test would notice being broken: packaging, imports, sizes, names."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from engine import hooks, plugin
from engine.specs import POINTS

ROOT = Path(__file__).parents[1]
PACKAGES = {"engine": ROOT / "core", "engine.plugins": ROOT / "plugins", "engine.server": ROOT / "server"}
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

CORE_LIBRARIES = {"torch", "numpy", "pluggy", "pydantic", "pydantic_core", "yaml", "msgspec", "tokenizers", "jinja2"}
CORE_LIBRARIES.add("triton")  # by modules that are imported only where a CUDA device was chosen
KIT_LIBRARIES = CORE_LIBRARIES | {"pytest", "hypothesis", "safetensors", "transformers"}
"""What the conformance kit may import beside."""


def sources(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*.py")) if "__pycache__" not in path.parts)


def module_name(path: Path) -> str:
    """The name under which a file of ours is imported."""
    for name in ("engine.plugins", "engine.server", "engine"):
        if path.is_relative_to(PACKAGES[name]):
            inner = path.relative_to(PACKAGES[name]).with_suffix("").parts
            return ".".join((name, *(p for p in inner if p != "__init__")))
    raise AssertionError(f"{path} is not ours")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def imports(path: Path) -> Iterator[tuple[str, bool]]:
    """Names of imported modules, and whether the import is for type checkers only."""
    typed = {
        id(inner)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, id(node) in typed) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            yield from ((f"{node.module}.{alias.name}", id(node) in typed) for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def run(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, **more)  # type: ignore[call-overload,no-any-return]


# Packaging


def test_the_package_list_is_what_the_folders_are() -> None:
    folders = {module_name(path) for root in PACKAGES.values() for path in root.rglob("__init__.py")}
    assert folders == set(PROJECT["tool"]["setuptools"]["packages"])


def test_every_plugin_folder_has_an_entry_point_and_every_entry_point_a_module() -> None:
    stated = PROJECT["project"]["entry-points"]["engine"]
    folders = {path.parent for path in PACKAGES["engine.plugins"].glob("*/*/__init__.py")}
    expected = {f"{f.parent.name}.{f.name}": f"engine.plugins.{f.parent.name}.{f.name}" for f in folders}
    assert {name: target for name, target in stated.items() if target.startswith("engine.plugins.")} == expected
    for target in stated.values():
        found = [package for package in PACKAGES if within(target, package)]
        assert found, f"the entry point {target} is not ours"


def test_the_package_states_its_hook_api() -> None:
    assert PROJECT["project"]["entry-points"][hooks.API_GROUP] == {"hooks": f"v{hooks.HOOK_API}"}


def test_no_file_in_core_hides_a_package() -> None:
    assert not [name for name in ("plugins", "server") if list((ROOT / "core").glob(f"{name}*"))]


# Imports


def test_core_imports_neither_plugins_nor_server_nor_foreign_libraries() -> None:
    for path in sources(PACKAGES["engine"]):
        libraries = KIT_LIBRARIES if path.is_relative_to(ROOT / "core" / "testing") else CORE_LIBRARIES
        for name, typed in imports(path):
            assert not within(name, "engine.plugins"), f"{path}: {name}"
            assert not within(name, "engine.server"), f"{path}: {name}"
            top = name.partition(".")[0]
            assert typed or top == "engine" or top in libraries | sys.stdlib_module_names, f"{path}: {name}"


def test_a_plugin_imports_no_other_plugin_and_no_server() -> None:
    for path in sources(PACKAGES["engine.plugins"]):
        own = ".".join(module_name(path).split(".")[:4])
        for name, _ in imports(path):
            assert not within(name, "engine.server"), f"{path}: {name}"
            assert not within(name, "engine.plugins") or within(name, own), f"{path}: {name}"


def test_the_server_imports_no_plugin() -> None:
    for path in sources(PACKAGES["engine.server"]):
        for name, _ in imports(path):
            assert not within(name, "engine.plugins"), f"{path}: {name}"


def test_no_plugin_module_imports_torch() -> None:
    targets = sorted(PROJECT["project"]["entry-points"]["engine"].values())
    code = f"""
import importlib, sys
for target in {targets}:
    importlib.import_module(target)
    heavy = {{"torch", "transformers", "triton", "fastapi"}} & set(sys.modules)
    assert not heavy, f"{{target}} imports {{heavy}}"
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


def test_core_imports_with_every_plugin_removed(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "core", tmp_path / "engine", ignore=shutil.ignore_patterns("__pycache__"))
    code = f"""
import importlib, pkgutil, sys
# Without the finder of an editable install, which would lead back to the checkout.
sys.meta_path = [finder for finder in sys.meta_path if "Editable" not in repr(finder)]
sys.path.insert(0, {str(tmp_path)!r})
import engine
assert engine.__file__.startswith({str(tmp_path)!r}), engine.__file__
names = [module.name for module in pkgutil.walk_packages(engine.__path__, "engine.")]
assert len(names) > 30, names
for name in names:
    importlib.import_module(name)
for gone in ("engine.plugins", "engine.server"):
    assert gone not in sys.modules
    assert importlib.util.find_spec(gone) is None
"""
    result = run(code, cwd=str(tmp_path))
    assert result.returncode == 0, result.stderr


def test_no_module_of_ours_goes_by_two_names() -> None:
    names = [module_name(path) for root in PACKAGES.values() for path in sources(root)]
    code = f"""
import importlib, sys
from collections import Counter
for name in {sorted(set(names))}:
    importlib.import_module(name)
files = {{name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}}
ours = {{n: f for n, f in files.items() if f.startswith({str(ROOT)!r}) and "site-packages" not in f}}
assert "engine" in ours
assert not [name for name in ours if name.partition(".")[0] != "engine"], ours
assert not [file for file, count in Counter(ours.values()).items() if count > 1]
"""
    result = run(code)
    assert result.returncode == 0, result.stderr


# Sizes and habits


def all_sources() -> list[Path]:
    folders = ("core", "plugins", "server", "tests", "benchmarks", "examples")
    return [path for folder in folders for path in sources(ROOT / folder)]


def is_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """A Triton or Gluon kernel is one pass over its tile, and its arguments alone, one a line, fill forty."""
    return any("triton.jit" in (text := ast.unparse(d)) or "gluon.jit" in text for d in node.decorator_list)


def test_files_and_functions_are_short() -> None:
    long_files = {str(p.relative_to(ROOT)): n for p in all_sources() if (n := len(p.read_text().splitlines())) > 400}
    long_functions = {
        f"{path.relative_to(ROOT)}:{node.name}": length
        for path in all_sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or 0) - node.lineno + 1) > (180 if is_kernel(node) else 60)
    }
    assert (long_files, long_functions) == ({}, {})


def test_only_the_configuration_reads_the_environment() -> None:
    allowed = {ROOT / "core" / "config" / "load.py", ROOT / "core" / "config" / "components.py"}
    allowed.add(ROOT / "core" / "process.py")  # sets one for the OpenMP runtime of its own process
    readers = {
        path
        for root in PACKAGES.values()
        for path in sources(root)
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv") and ast.unparse(node.value) == "os"
    }
    assert readers <= allowed


@pytest.mark.parametrize("module", [hooks, plugin, *POINTS], ids=lambda module: module.__name__)
def test_the_public_names_of_the_contracts_are_stated(module: ModuleType) -> None:
    own = {
        node.name
        for node in tree(Path(str(module.__file__))).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_")
    }
    assert own - {"runs_anywhere"} <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def test_every_extension_point_has_its_hook_and_number() -> None:
    for point in POINTS:
        assert isinstance(point.API, int)
        assert hasattr(getattr(point, point.HOOK), "engine_spec")
