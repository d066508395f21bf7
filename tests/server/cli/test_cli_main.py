"""The program as a whole: what it imports, what it prints, how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from engine import __version__
from engine.errors import PluginError, ResourceError
from engine.hooks import hookimpl
from engine.plugin import Offer
from engine.registry import Registry
from engine.server.cli import main as main_module
from engine.server.cli.main import main, program


def heavy_imports(*arguments: str) -> tuple[int, list[str], str]:
    """Exit code, the heavy modules that a command imported, and its output; in a process of its own."""
    code = f"""
import json, sys
from engine.server.cli.main import main
sys.argv = ["engine", *{list(arguments)!r}]
code = 0
try:
    main()
except SystemExit as end:
    code = end.code or 0
heavy = [name for name in ("torch", "transformers", "fastapi", "uvicorn", "rich", "numpy") if name in sys.modules]
print("\\n" + json.dumps([code, heavy]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    output, _, last = done.stdout.rstrip("\n").rpartition("\n")
    code_, heavy = json.loads(last)
    return code_, heavy, output


@pytest.mark.parametrize(
    ("arguments", "shows"),
    [
        (["--help"], "Examples:"),
        (["--version"], f"engine {__version__}"),
        (["plugins", "list"], "kv_caches.radix"),
        (["plugins", "show", "radix"], "radix: KV cache"),
        (["config", "--help"], "schema"),
        (["config", "explain"], "kv_cache.page_size"),
        (["config", "schema"], "json-schema.org"),
        (["doctor", "--device", "cpu"], "HARDWARE"),
    ],
)
def test_commands_that_only_look_import_nothing_heavy(arguments: list[str], shows: str) -> None:
    code, heavy, output = heavy_imports(*arguments)
    assert (code, heavy) == (0, [])
    assert shows in output


def test_help_lists_every_command_with_what_it_does() -> None:
    output = CliRunner().invoke(program, ["-h"]).output
    for name in ("serve", "chat", "plugins", "config", "doctor"):
        assert f"\n  {name} " in output
    assert "engine config check my.yaml" in output


def test_an_unknown_command_is_a_usage_error() -> None:
    result = CliRunner().invoke(program, ["bogus"])
    assert result.exit_code == 2
    assert "No such command 'bogus'" in result.output


def with_command(monkeypatch: pytest.MonkeyPatch, name: str, error: Exception | None = None) -> None:
    """Installs a plugin with one command."""

    def build(options: object) -> click.Command:
        @click.command()
        def command() -> None:
            if error:
                raise error
            click.echo("hello from a plugin")

        return command

    offer = Offer(name=name, summary="says hello", build=build)
    plugins = Registry.of({"acme": SimpleNamespace(cli_commands=hookimpl(lambda: [offer]))}, distribution="acme")
    monkeypatch.setattr(Registry, "discover", classmethod(lambda cls: plugins))


def test_a_plugin_adds_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, "greet")
    assert CliRunner().invoke(program, ["greet"]).output == "hello from a plugin\n"
    assert "greet    says hello" in CliRunner().invoke(program, ["--help"]).output


def test_a_plugin_does_not_replace_a_command_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, "doctor")
    result = CliRunner().invoke(program, ["--help"])
    assert "the command 'doctor' of acme 0 has a built-in name" in result.stderr
    assert "says hello" not in result.output
    assert "HARDWARE" in CliRunner().invoke(program, ["doctor", "--device", "cpu"]).output


def test_help_survives_a_clash_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    def clash(cls: type[Registry]) -> Registry:
        raise PluginError("two plugins collide")

    monkeypatch.setattr(Registry, "discover", classmethod(clash))
    result = CliRunner().invoke(program, ["--help"])
    assert result.exit_code == 0
    assert "commands of plugins are left out: two plugins collide" in result.stderr


def ends(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["engine", *arguments])
    with pytest.raises(SystemExit) as end:
        main()
    assert isinstance(end.value.code, int)
    return end.value.code


def test_an_error_of_the_user_is_a_sentence_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with_command(monkeypatch, "fail", ResourceError("the shelf is empty; fill it"))
    assert ends(monkeypatch, "fail") == 3
    assert capsys.readouterr() == ("", "engine: the shelf is empty; fill it\n")


def test_several_problems_are_several_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("kv_cache: {page_size: 0}\nserver: {port: x}\n")
    assert ends(monkeypatch, "config", "check", str(config)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.split(" is ")[0] for line in err.splitlines()] == [
        f"engine: {config}:1: kv_cache.page_size",
        f"engine: {config}:2: server.port",
    ]


def test_an_error_of_ours_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    with_command(monkeypatch, "fail", ZeroDivisionError("a bug"))
    monkeypatch.setattr(sys, "argv", ["engine", "fail"])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        main()


def test_the_commands_of_our_own_exist() -> None:
    for name, command in main_module._OWN.items():
        assert command.load().get_short_help_str(), name
