"""`engine plugins matrix`: which components fit which, and which devices."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click

from engine.server.cli.parameters import device_option, json_option
from engine.server.cli.table import table as aligned

if TYPE_CHECKING:
    from engine.device import DeviceProfile
    from engine.matrix import Table
    from engine.registry import Registry

_PAGE = """# Which components fit which

Made by `engine plugins matrix --markdown`: what composing would say of every pair of built-in components, computed from
what they declare. A pair that fits here may still be refused for a certain model, page size or dtype;
`engine plugins explain CONFIG` tells. Extension points that aren't shown against each other have nothing to disagree
about.
"""


@click.command(
    "matrix", help="Print which components fit which, on which devices and in which roles, with the reasons."
)
@device_option
@json_option
@click.option("--markdown", "as_markdown", is_flag=True, help="Print Markdown, as in docs/compatibility.md.")
def command(device: str | None, as_json: bool, as_markdown: bool) -> None:
    """Imports plugin modules, which are light; nothing is built, no model is needed."""
    from engine.registry import Registry

    found = computed(Registry.discover(), device)
    if as_json:
        click.echo(json.dumps([_as_dict(each) for each in found], indent=2))
    elif as_markdown:
        click.echo(markdown(found), nl=False)
    else:
        click.echo("\n\n".join(_text(each, aligned) for each in found))


def computed(registry: Registry, device: str | None = None) -> list[Table]:
    """The tables for every known device, or for one (its name, or a file)."""
    from engine.device_profiles import known, load_profile
    from engine.matrix import tables

    if device is None:
        return tables(registry, known())
    profile: DeviceProfile = load_profile(device)
    return tables(registry, {device: profile}, profile)


def markdown(found: Sequence[Table]) -> str:
    """The whole page."""
    return "\n".join([_PAGE, *(f"## {_title(each)}\n\n{_text(each, _pipes)}\n" for each in found)])


def _as_dict(one: Table) -> dict[str, Any]:
    return {
        "rows": one.rows,
        "columns": one.columns,
        "cells": [
            {"row": c.row, "column": c.column, "fits": not c.reasons, "reasons": list(c.reasons)} for c in one.cells
        ],
    }


def _text(one: Table, draw: Callable[[Sequence[str], list[list[str]]], str]) -> str:
    """The grid; a cell that doesn't fit has the numbers of its reasons, which follow."""
    numbers = {why: i for i, why in enumerate(dict.fromkeys(w for c in one.cells for w in c.reasons), start=1)}
    grid = draw([f"{one.rows} / {one.columns}", *one.names], _grid(one, numbers))
    notes = "\n".join(f"{i}. {why}" for why, i in numbers.items())
    return f"{grid}\n\n{notes}" if notes else grid


def _grid(one: Table, numbers: Mapping[str, int]) -> list[list[str]]:
    rows: dict[str, list[str]] = {}
    for cell in one.cells:
        said = "no: " + ", ".join(str(numbers[why]) for why in cell.reasons) if cell.reasons else "yes"
        rows.setdefault(cell.row, [cell.row]).append(said)
    return list(rows.values())


def _pipes(headers: Sequence[str], rows: list[list[str]]) -> str:
    return "\n".join(_lines(headers, rows))


def _lines(headers: Sequence[str], rows: list[list[str]]) -> Iterator[str]:
    yield f"| {' | '.join(headers)} |"
    yield f"|{'---|' * len(headers)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"


def _title(one: Table) -> str:
    return f"{one.rows[0].upper()}{one.rows[1:]} and {one.columns}"


__all__ = ["command", "computed", "markdown"]
