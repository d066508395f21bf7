"""Conformance of commands: they are found under their name, and help costs nothing."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from engine.testing.offer import OfferConformance


class CLICommandConformance(OfferConformance):
    """Subclasses set `offer` and `module`."""

    def command(self) -> Any:
        """The command with the options of the suite."""
        click = pytest.importorskip("click")
        command = self.offer.build(self.options())
        assert isinstance(command, click.Command)
        return command

    def test_the_name_is_one_word(self) -> None:
        """It is typed after `engine`."""
        assert self.offer.name.replace("-", "").replace("_", "").isalnum()

    def test_help_is_there_for_every_level(self) -> None:
        """The command and its subcommands, with a line on each option."""
        runner = pytest.importorskip("click.testing").CliRunner()
        for path in levels(self.command()):
            result = runner.invoke(self.command(), [*path, "--help"])
            assert result.exit_code == 0, f"{' '.join(path) or self.offer.name} --help: {result.output}"
            assert "Usage:" in result.output

    def test_an_unknown_option_is_a_usage_error(self) -> None:
        """Exit code 2, as everywhere."""
        runner = pytest.importorskip("click.testing").CliRunner()
        assert runner.invoke(self.command(), ["--no-such-option"]).exit_code == 2

    def test_building_it_loads_no_torch(self) -> None:
        """`engine NAME --help` must come at once."""
        code = (
            f"import sys, {self.module} as module\n"
            f"offer = next(o for o in module.cli_commands() if o.name == {self.offer.name!r})\n"
            "offer.build(offer.options())\n"
            "print('torch' in sys.modules)"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "False"


def levels(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The command's own path and those of its subcommands."""
    inner: dict[str, Any] = getattr(command, "commands", {})
    return [path, *(found for name, sub in inner.items() for found in levels(sub, (*path, name)))]


__all__ = ["CLICommandConformance"]
