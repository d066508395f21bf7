"""The command `engine bench`, offered as a plugin offers one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Offer, Options

if TYPE_CHECKING:
    import click


def build(options: Options) -> click.Command:
    """The command; everything it needs is imported now."""
    from engine.server.cli.bench_command import command

    return command


@hookimpl
def cli_commands() -> list[Offer[click.Command]]:
    """One command."""
    return [Offer(name="bench", summary="Measure latency and throughput of any OpenAI endpoint.", build=build)]
