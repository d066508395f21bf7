"""The `engine` program. Commands are imported when they are run, so that help and lists come at once."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from engine import __version__
from engine.errors import EngineError
from engine.server.cli.lazy import Lazy, LazyGroup, lazy

if TYPE_CHECKING:
    from engine.registry import Owned

_OWN = {
    "serve": lazy("engine.server.cli.serve:command", "Serve a model over an OpenAI-compatible HTTP API."),
    "route": lazy("engine.server.cli.route:command", "Put one address over several engines, prefill and decode."),
    "chat": lazy("engine.server.cli.chat:command", "Talk to a model in this terminal."),
    "batch": lazy("engine.server.cli.batch:command", "Answer a file of requests."),
    "plugins": lazy("engine.server.cli.plugins:group", "See what is installed, and what a configuration takes of it."),
    "config": lazy("engine.server.cli.config:group", "Check a configuration, explain it, or print its schema."),
    "plan": lazy("engine.server.cli.plan:command", "Compute what a configuration takes of a device, without loading."),
    "why": lazy("engine.server.cli.why:command", "Say what the time of one request was made of."),
    "doctor": lazy("engine.server.cli.doctor:command", "Look at this machine and say which components can run on it."),
}

_HELP = "Serve large language models with an engine in which every part is a plugin, composed from one YAML file."

_EPILOG = """\b
Examples:
  engine serve                      serve the small packaged model on 127.0.0.1:8000
  engine serve my.yaml --set server.port=9000
  engine config check my.yaml       find mistakes before anything is loaded
  engine plugins explain my.yaml    what would be composed, and why
  engine plugins show radix         the options of one component
"""


def main() -> None:
    """Run the program; an error that the user can put right becomes a sentence and an exit code, no traceback."""
    try:
        program()
    except EngineError as error:
        for line in str(error).splitlines():
            click.echo(f"engine: {line}", err=True)
        sys.exit(error.exit_code)


def _plugin_commands() -> Mapping[str, Lazy]:
    """Commands that plugins offer. One that fails, or that takes a name of ours, is named on stderr and left out."""
    from engine.registry import Registry

    try:
        offers = Registry.discover().offers("cli_commands")
    except EngineError as error:
        click.echo(f"engine: commands of plugins are left out: {error}", err=True)
        return {}
    found: dict[str, Lazy] = {}
    for owned in offers:
        if owned.offer.name in _OWN:
            click.echo(f"engine: the command {owned.offer.name!r} of {owned.entry.owner} has a built-in name", err=True)
        else:
            found[owned.offer.name] = Lazy(owned.offer.summary, partial(_build, owned))
    return found


def _build(owned: Owned[Any]) -> click.Command:
    command: click.Command = owned.build(owned.offer.options())
    return command


program = click.version_option(__version__, prog_name="engine", message="%(prog)s %(version)s")(
    LazyGroup(own=_OWN, more=_plugin_commands, help=_HELP, epilog=_EPILOG)
)

__all__ = ["main", "program"]
