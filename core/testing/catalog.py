"""The list of all checks: `python -m engine.testing.catalog` prints the end of docs/conformance.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from engine.registry import noun
from engine.testing.claims import CONTRACT
from engine.testing.offer import OfferConformance
from engine.testing.suites import SUITES, suite

HEADING = "## All checks"
"""Under it stands what this module prints."""


def catalog() -> str:
    """Markdown: a table for what every offer must keep, and one for each extension point."""
    parts = [HEADING, "### Every offer", table(OfferConformance, object)]
    for hook in SUITES:
        kind = suite(hook)
        parts += [f"### {noun(hook)[:1].upper()}{noun(hook)[1:]}", f"`{kind.__module__}.{kind.__name__}`"]
        parts.append(table(kind, OfferConformance))
    return "\n\n".join(parts) + "\n"


def table(kind: type[Any], base: type[Any]) -> str:
    """The checks that a suite has beyond those of its base."""
    rows = [
        f"| {' '.join(name.split('_')[1:])} | {claims(check)} | {summary(check)} |"
        for name, check in checks(kind)
        if getattr(base, name, None) is not check
    ]
    return "\n".join(["| check | proves | in detail |", "|---|---|---|", *rows])


def checks(kind: type[Any]) -> Iterator[tuple[str, Any]]:
    """Names and functions, in the order in which they are written, the base's first."""
    for owner in reversed(kind.__mro__):
        yield from ((name, check) for name, check in vars(owner).items() if name.startswith("test_"))


def claims(check: Any) -> str:
    """The claims that a check is marked with."""
    marks = [mark for mark in getattr(check, "pytestmark", ()) if mark.name == "proves"]
    return ", ".join(f"`{claim}`" for mark in marks for claim in mark.args) or f"`{CONTRACT}`"


def summary(check: Any) -> str:
    """The check's docstring, on one line."""
    return " ".join((check.__doc__ or "").split()).replace("|", "\\|")


if __name__ == "__main__":
    print(catalog(), end="")

__all__ = ["HEADING", "catalog"]
