"""`engine plugins lock`, and what `engine serve --locked` makes sure of."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.server.cli.parameters import config_argument, loaded_with_registry, set_option

if TYPE_CHECKING:
    from engine.discovery import Entry

DEFAULT = "engine.lock"


@click.command("lock", help="Write name, version and hash of every distribution whose plugins CONFIG lets in.")
@config_argument
@set_option
@click.option(
    "-o", "--output", default=DEFAULT, show_default=True, type=click.Path(path_type=Path), help="File; - is stdout."
)
def command(config: Path | None, overrides: tuple[str, ...], output: Path) -> None:
    """What is installed now becomes what `engine serve --locked` insists on."""
    from engine.errors import ResourceError
    from engine.lock import dump, take

    lock = take(loaded_with_registry(config, overrides)[1].entries)
    if str(output) == "-":
        click.echo(dump(lock), nl=False)
        return
    try:
        output.write_text(dump(lock), encoding="utf-8")
    except OSError as error:
        raise ResourceError(f"{output} can't be written: {error.strerror}; name another file with -o") from None
    plugins = sum(len(each.plugins) for each in lock)
    click.echo(f"{output}: {plugins} plugins of {', '.join(f'{each.name} {each.version}' for each in lock)}")


def insist(path: Path, entries: Iterable[Entry]) -> None:
    """Raise PluginError, one line per difference, unless the installed plugins are those of the lock."""
    from engine.errors import PluginError
    from engine.lock import differences, load, take

    if problems := differences(load(path), take(entries)):
        raise PluginError("\n".join(f"{path}: {problem}" for problem in problems))


__all__ = ["DEFAULT", "command", "insist"]
