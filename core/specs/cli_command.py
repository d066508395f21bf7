"""Extension point: commands of the `engine` program.

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
