"""Extension point: commands of the `engine` program.

Threads: `build` runs in the `engine` program when the command is asked for; the command then owns the main thread.

Errors: raise `click.ClickException`, or a subclass of `engine.errors.EngineError`, for what the user can put right: one
sentence, no traceback.

`build(options) -> click.Command`
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    import click

API: Final = 1
HOOK: Final = "cli_commands"


@hookspec
def cli_commands() -> Iterable[Offer[click.Command]]:  # type: ignore[empty-body]
    """Offer commands; the offer's name is the command's, its summary the help line. Must not import torch."""


__all__ = ["API", "HOOK", "cli_commands"]
