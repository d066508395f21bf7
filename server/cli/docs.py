"""`engine plugins docs`: the contract of an extension point, as the installed engine has it."""

from __future__ import annotations

from pathlib import Path

import click

from engine.server.cli.points import find_point


@click.command("docs", help="Print the contract of POINT (such as kv_cache), or list the extension points.")
@click.argument("point", required=False)
@click.option(
    "--write", type=click.Path(path_type=Path, file_okay=False), help="Write all pages into this folder instead."
)
def command(point: str | None, write: Path | None) -> None:
    """The pages of `docs/extension-points/`."""
    from engine.spec_docs import page, pages

    if write is not None:
        write.mkdir(parents=True, exist_ok=True)
        for name, text in pages().items():
            (write / name).write_text(text)
    else:
        click.echo(page(find_point(point)) if point else pages()["README.md"], nl=False)


__all__ = ["command"]
