"""A click group that imports a command when it is run, and lists it without importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module

import click


@dataclass(frozen=True, slots=True)
class Lazy:
    """A command that isn't imported yet."""

    summary: str
    load: Callable[[], click.Command]


def lazy(target: str, summary: str) -> Lazy:
    """The command at `module:attribute`."""
    module, _, attribute = target.partition(":")

    def load() -> click.Command:
        found = getattr(import_module(module), attribute)
        assert isinstance(found, click.Command), f"{target} is no command"
        return found

    return Lazy(summary, load)


class LazyGroup(click.Group):
    """Its own commands by name, and on demand those that `more` finds."""

    def __init__(
        self, *, own: Mapping[str, Lazy], more: Callable[[], Mapping[str, Lazy]], help: str, epilog: str
    ) -> None:
        super().__init__(
            name="engine", help=help, epilog=epilog, context_settings={"help_option_names": ["-h", "--help"]}
        )
        self._own = own
        self._more = more

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Own commands first, in their order."""
        return [*self._own, *self._more()]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command; plugins are looked at only when it is none of ours."""
        found = self._own.get(cmd_name) or self._more().get(cmd_name)
        return found.load() if found else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, from the summaries."""
        everything = {**self._own, **self._more()}
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in everything.items()])


__all__ = ["Lazy", "LazyGroup", "lazy"]
