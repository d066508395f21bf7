"""What `engine plugins check` writes to a file: JSON, JUnit XML or Markdown, by the suffix of its name."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final
from xml.etree import ElementTree

from engine.errors import ConfigError, ResourceError
from engine.testing.check import Checked
from engine.testing.verdict import Outcome

_NOT_RUN: Final = (Outcome.SKIPPED, Outcome.UNCHECKED)


def as_dict(result: Checked) -> dict[str, Any]:
    """One offer, its verdicts and every check."""
    entry = result.owned.entry
    return {
        "name": result.owned.offer.name,
        "point": result.hook,
        "plugin": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "objection": result.objection,
        "verdicts": [asdict(verdict) for verdict in result.verdicts],
        "checks": [asdict(check) for check in result.checks],
    }


def as_json(results: Sequence[Checked]) -> str:
    """Everything."""
    return json.dumps([as_dict(result) for result in results], indent=2) + "\n"


def as_junit(results: Sequence[Checked]) -> str:
    """One test suite per offer, one test case per check, for continuous integration."""
    root = ElementTree.Element("testsuites")
    for result in results:
        outcomes = [check.outcome for check in result.checks]
        failures = str(outcomes.count(Outcome.FAILED))
        skipped = str(sum(outcomes.count(outcome) for outcome in _NOT_RUN))
        suite = ElementTree.SubElement(
            root, "testsuite", name=result.title, tests=str(len(outcomes)), failures=failures, skipped=skipped
        )
        for check in result.checks:
            where = f"{result.hook}.{result.owned.offer.name}"
            case = ElementTree.SubElement(
                suite, "testcase", classname=where, name=check.case, time=f"{check.seconds:.3f}"
            )
            if check.outcome is Outcome.FAILED:
                ElementTree.SubElement(case, "failure", message=check.reason.partition("\n")[0]).text = check.reason
            elif check.outcome in _NOT_RUN:
                ElementTree.SubElement(case, "skipped", message=check.reason)
    ElementTree.indent(root)
    return ElementTree.tostring(root, encoding="unicode", xml_declaration=True) + "\n"


def as_markdown(results: Sequence[Checked]) -> str:
    """A table of verdicts per offer."""
    parts = []
    for result in results:
        rows = [
            f"| `{v.claim}` | {v.passed} | {v.failed} | {v.skipped} | {v.outcome} | {v.why.replace('|', '/')} |"
            for v in result.verdicts
        ]
        head = ["| claim | passed | failed | skipped | verdict | why |", "|---|---|---|---|---|---|"]
        body = [f"Not checked: {result.objection}"] if result.objection else [*head, *rows]
        parts.append("\n".join([f"## {result.title}", "", *body]))
    return "\n\n".join(parts) + "\n"


FORMATS: Final[Mapping[str, Callable[[Sequence[Checked]], str]]] = {
    ".json": as_json,
    ".xml": as_junit,
    ".md": as_markdown,
}
"""Suffix -> writer."""


def require_place(path: Path) -> None:
    """Raise ConfigError when no report has this suffix, or there is no such folder; asked before the checks run."""
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"can't tell the format of the report {path}; let its name end in {', '.join(FORMATS)}")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"the report {path} can't be written: there is no folder {path.parent}; make it first")


def write(results: Sequence[Checked], path: Path) -> None:
    """Write the report; raises as `require_place` does, and ResourceError when the system refuses to write it."""
    require_place(path)
    try:
        path.write_text(FORMATS[path.suffix.lower()](results), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"the report {path} can't be written: {error.strerror}; name another file") from None


__all__ = ["FORMATS", "as_dict", "as_json", "as_junit", "as_markdown", "require_place", "write"]
