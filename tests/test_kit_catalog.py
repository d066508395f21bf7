"""The kit is complete and written down: a suite for every extension point, a class for every built-in offer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import engine.testing
from engine.registry import Registry
from engine.specs import POINTS
from engine.testing.catalog import HEADING, catalog, checks
from engine.testing.suites import SUITES, suite

ROOT = Path(__file__).parents[1]


def test_every_extension_point_has_a_suite_and_every_suite_an_extension_point() -> None:
    assert set(SUITES) == {point.HOOK for point in POINTS}
    named = set(re.findall(r"`engine\.testing\.(\w+\.\w+Conformance)`", engine.testing.__doc__ or ""))
    assert named == {target.removeprefix("engine.testing.").replace(":", ".") for target in SUITES.values()}


def test_the_page_lists_every_check() -> None:
    page = (ROOT / "docs" / "conformance.md").read_text()
    assert HEADING in page
    listed = page[page.index(HEADING) :]
    assert listed == catalog(), f"replace what follows {HEADING!r} by the output of `python -m engine.testing.catalog`"


@pytest.mark.parametrize("hook", SUITES)
def test_every_check_says_what_it_is_about(hook: str) -> None:
    assert [name for name, check in checks(suite(hook)) if not check.__doc__] == []


def built_in_modules() -> set[str]:
    """The modules whose offers ship with the engine."""
    entries = [entry for entry in Registry.discover().entries if entry.distribution == "engine-llm"]
    return {entry.load().__name__ for entry in entries}  # type: ignore[attr-defined]


def test_every_built_in_plugin_has_a_class_of_its_suite() -> None:
    """But for those that break the part they wrap on purpose."""
    texts = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    held = set(re.findall(r'^    module = "([\w.]+)"', texts, re.MULTILINE))
    assert {module for module in built_in_modules() - held if not module.endswith(".faulty")} == set()
