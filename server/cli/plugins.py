"""`engine plugins …`: what is installed, what each component can do, what a configuration takes of it and why."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.server.cli import check, docs, explain, lock, matrix, new
from engine.server.cli.parameters import json_option, loaded_with_registry
from engine.server.cli.table import table

if TYPE_CHECKING:
    from engine.discovery import Entry
    from engine.plugin import Offer
    from engine.registry import Owned, Registry

_LIST_HEADERS = ("NAME", "DISTRIBUTION", "VERSION", "API", "STATE", "OFFERS, OR WHAT IS WRONG")


@click.group(help="See what is installed, and what a configuration takes of it.")
def group() -> None:
    """The group has no work of its own."""


@group.command("list", help="List every installed plugin, where it comes from, and whether it works.")
@click.option("--config", type=click.Path(path_type=Path), help="Obey the plugins section of this file.")
@json_option
def list_(config: Path | None, as_json: bool) -> None:
    """Imports the plugin modules, which are light, so that a broken one shows; nothing is built."""
    from engine.registry import Registry

    registry = loaded_with_registry(config, ())[1] if config else Registry.discover()
    entries = registry.load()
    offers = _offers_by_entry(registry)
    if as_json:
        click.echo(json.dumps([_entry_dict(e, offers.get(e.name, [])) for e in entries], indent=2))
        return
    rows = [
        (
            e.name,
            e.distribution,
            e.version,
            _api(e),
            e.state,
            e.reason or ", ".join(o.offer.name for _, o in offers[e.name]),
        )
        for e in entries
    ]
    click.echo(table(_LIST_HEADERS, rows))
    for warning in (w for e in entries for w in e.warnings):
        click.echo(f"warning: {warning}")


@group.command(help="Show what NAME (a component, or a plugin) is, can do, and takes as options.")
@click.argument("name")
def show(name: str) -> None:
    """Several extension points may have a component of that name; all of them are shown."""
    from engine.discovery import nearest
    from engine.errors import PluginError
    from engine.registry import Registry

    registry = Registry.discover()
    entry = next((e for e in registry.load() if e.name == name), None)
    offers = _offers_by_entry(registry)
    if entry is not None:
        click.echo(f"{entry.name}: plugin of {entry.owner}, hook API {_api(entry)}, {entry.state}")
        click.echo(f"  {entry.reason}\n" if entry.reason else "")
    found = [(p, o) for each in offers.values() for p, o in each if name in (o.offer.name, o.entry.name)]
    if not found and entry is None:
        known = {o.offer.name for each in offers.values() for _, o in each} | set(offers)
        raise PluginError(f"nothing named {name!r} is installed (see `engine plugins list`){nearest(name, known)}")
    click.echo("\n\n".join("\n".join(_describe(point, owned)) for point, owned in found))


def _offers_by_entry(registry: Registry) -> dict[str, list[tuple[str, Owned[Any]]]]:
    """Entry-point name -> extension points and offers."""
    from engine.specs import POINTS

    found: dict[str, list[tuple[str, Owned[Any]]]] = {entry.name: [] for entry in registry.entries}
    for point in POINTS:
        for owned in registry.offers(point.HOOK):
            found[owned.entry.name].append((point.HOOK, owned))
    return found


def _entry_dict(entry: Entry, offers: Iterable[tuple[str, Owned[Any]]]) -> dict[str, Any]:
    return {
        "name": entry.name,
        "distribution": entry.distribution,
        "version": entry.version,
        "api": entry.api,
        "state": entry.state,
        "reason": entry.reason,
        "warnings": list(entry.warnings),
        "offers": [{"point": point, "name": owned.offer.name} for point, owned in offers],
    }


def _api(entry: Entry) -> str:
    return "?" if entry.api is None else f"v{entry.api}"


def _describe(point: str, owned: Owned[Any]) -> Iterator[str]:
    from engine.config.reference import option_rows
    from engine.registry import noun

    offer = owned.offer
    yield click.style(f"{offer.name}: {noun(point)}", bold=True)
    yield f"  {offer.summary}"
    yield f"  from {owned.entry.owner}, plugin {owned.entry.name}; rank {offer.rank}"
    yield from (f"  {line}" for line in _capabilities(offer))
    rows = list(option_rows(offer.options))
    yield "  no options" if not rows else ""
    if rows:
        yield from (f"  {line}" for line in table(("OPTION", "TYPE", "DEFAULT", "MEANING"), rows).splitlines())


def _capabilities(offer: Offer[Any]) -> Iterator[str]:
    """One line per limit or ability that the offer declares, and per other part that it requires something of."""
    from engine.registry import noun

    for declared in fields(offer.capabilities):
        if value := getattr(offer.capabilities, declared.name):
            words = ".".join(map(str, value)) if isinstance(value, tuple) else ", ".join(sorted(map(str, value)))
            yield f"{declared.name.replace('_', ' ')}: {words}"
    for point, needs in offer.requires.items():
        asked = [str(v) for f in fields(needs) if (v := getattr(needs, f.name)) and not isinstance(v, frozenset)]
        asked += sorted(map(str, needs.masks | needs.flags))
        yield f"requires of the {noun(point)}: {', '.join(asked)}"


group.add_command(check.command)
group.add_command(docs.command)
group.add_command(explain.command)
group.add_command(lock.command)
group.add_command(matrix.command)
group.add_command(new.command)

__all__ = ["group"]
