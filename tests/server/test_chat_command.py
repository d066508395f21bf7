from __future__ import annotations

from typing import Any

from click.testing import CliRunner

from engine.server.cli.chat import command
from engine.server.cli.endpoint import EndpointError


def talk(live: Any, lines: str, *options: str) -> Any:
    result = CliRunner().invoke(command, ["--url", live.base, *options], input=lines)
    assert result.exit_code == 0, result.output
    return result


def test_answers_are_printed_and_remembered(live: Any) -> None:
    result = talk(live, "one\ntwo\n", "--system", "Be terse.", "--temperature", "0", "--max-tokens", "40")
    assert result.stdout == "hello world\nhello world\n"
    first, second = live.core.calls
    assert bytes(first.prompt) == b"<system>Be terse.<user>one<assistant>"
    assert bytes(second.prompt) == b"<system>Be terse.<user>one<assistant>hello world<user>two<assistant>"
    assert (first.params.temperature, first.params.max_tokens) == (0.0, 40)


def test_reset_and_exit(live: Any) -> None:
    talk(live, "one\n/reset\n\ntwo\n/exit\nthree\n")
    assert [bytes(call.prompt) for call in live.core.calls] == [b"<user>one<assistant>", b"<user>two<assistant>"]


def test_a_refused_message_is_forgotten(live: Any) -> None:
    result = talk(live, "x" * 300 + "\none\n")
    assert "maximum context length" in result.stderr
    assert bytes(live.core.calls[0].prompt) == b"<user>one<assistant>"


def test_options_of_an_own_server_need_one() -> None:
    result = CliRunner().invoke(command, ["--url", "http://x", "--set", "a=b"])
    assert result.exit_code == 2


def test_a_server_that_does_not_start_is_told() -> None:
    result = CliRunner().invoke(command, ["--set", "server.prot=1"])
    assert isinstance(result.exception, EndpointError)
    assert "exit code 2" in str(result.exception)
