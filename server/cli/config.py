"""`engine config …`: check a YAML file, explain it, print the schema and the reference of all keys."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import click

from engine.server.cli.parameters import config_argument, json_option, loaded_with_registry, set_option
from engine.server.cli.table import table


@click.group(help="Check a configuration, explain it, or print its schema.")
def group() -> None:
    """The group has no work of its own."""


@group.command(help="Find every mistake in CONFIG (or in --set alone): keys, values, components and their options.")
@config_argument
@set_option
def check(config: Path | None, overrides: Sequence[str]) -> None:
    """Exit code 2 and one line per problem, or `ok`."""
    from engine.config.components import check as check_components

    loaded, registry = loaded_with_registry(config, overrides)
    check_components(loaded, registry)
    click.echo(f"{config or 'the configuration'}: ok")


@group.command(help="Show every value of CONFIG and where it came from; without CONFIG, the defaults.")
@config_argument
@set_option
@json_option
def explain(config: Path | None, overrides: Sequence[str], as_json: bool) -> None:
    """Secrets are masked."""
    from engine.config.explain import explain as rows_of

    rows = rows_of(*loaded_with_registry(config, overrides))
    if as_json:
        click.echo(json.dumps([row._asdict() for row in rows], indent=2))
    else:
        click.echo(table(("KEY", "VALUE", "FROM"), rows))


@group.command(
    help="Print the JSON Schema of the configuration, with the options of every installed component.",
    epilog="Editors: put `# yaml-language-server: $schema=engine.schema.json` on top of the YAML file.",
)
def schema() -> None:
    """For editors."""
    from engine.config.schema import json_schema
    from engine.registry import Registry

    click.echo(json.dumps(json_schema(Registry.discover()), indent=2))


@group.command(help="Print every key with its type, default and meaning, as Markdown.")
def reference() -> None:
    """For people."""
    from engine.config.reference import markdown
    from engine.registry import Registry

    click.echo(markdown(Registry.discover()), nl=False)


__all__ = ["group"]
