"""Swallows every option, --help among them."""

from broken_parts import offer

from engine.hooks import hookimpl

CAUGHT_BY = "test_help_is_there_for_every_level"


def build(options):
    import click

    return click.Command("broken", callback=lambda: None, add_help_option=False)


@hookimpl
def cli_commands():
    return [offer(build)]
