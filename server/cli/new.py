"""`engine plugins new`: a package to start from."""

from __future__ import annotations

from pathlib import Path

import click

from engine.server.cli.points import find_point


@click.command("new", help="Write a complete package NAME with a working component of POINT (such as attention).")
@click.argument("point")
@click.argument("name")
@click.option(
    "--dir",
    "parent",
    default=".",
    type=click.Path(path_type=Path, file_okay=False),
    help="Folder in which the package's folder is made; here by default.",
)
def command(point: str, name: str, parent: Path) -> None:
    """The package passes its own tests as it is written."""
    from engine.discovery import State
    from engine.errors import PluginError
    from engine.registry import Registry, noun
    from engine.scaffold import scaffold

    spec = find_point(point)
    package = scaffold(spec, name)
    for owned in Registry.discover().offers(spec.HOOK):
        if owned.offer.name == name and owned.entry.state is State.OK:
            raise PluginError(
                f"the {noun(spec.HOOK)} {name!r} is offered by {owned.entry.owner} already; take another name"
            )
    folder = parent / name
    package.write(folder)
    for path in sorted(package.files):
        click.echo(folder / path)
    click.echo(f"\nNext: pip install -e {folder}, then engine plugins check {name}; {folder / 'README.md'} says more.")


__all__ = ["command"]
