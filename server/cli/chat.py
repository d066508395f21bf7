"""`engine chat`: talk to a model in the terminal, over HTTP."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from engine.server.cli.endpoint import Endpoint, EndpointError

_GREETING: Final = "Ctrl-C cuts an answer short, /reset starts afresh, /exit or Ctrl-D ends."
_POLL: Final = 0.1


@click.command("chat")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of CONFIG; repeatable.")
@click.option("--url", help="A running server; one is started for this talk if unset.")
@click.option("--model", help="Name of the model; the first that the server lists if unset.")
@click.option("--api-key", help="Key to send as a bearer token.")
@click.option("--system", help="A system message.")
@click.option("--temperature", type=float, help="0 always takes the most likely token.")
@click.option("--max-tokens", type=int, help="Longest answer.")
def command(
    config: Path | None,
    overrides: tuple[str, ...],
    url: str | None,
    model: str | None,
    api_key: str | None,
    system: str | None,
    temperature: float | None,
    max_tokens: int | None,
) -> None:
    """Talk to a model.

    \b
    engine chat
    engine chat my.yaml --system "You are terse."
    engine chat --url http://127.0.0.1:8000
    """
    if url is not None and (config is not None or overrides):
        raise click.UsageError("CONFIG and --set are for a server of our own; leave them out with --url")
    sampling = {"temperature": temperature, "max_tokens": max_tokens}
    server = _given(url, api_key) if url is not None else _own_server(config, overrides)
    with server as endpoint, asyncio.Runner() as runner:
        talk = Talk(endpoint, model or runner.run(endpoint.first_model()), system, sampling)
        _converse(runner, talk)


@contextmanager
def _given(url: str, key: str | None) -> Iterator[Endpoint]:
    yield Endpoint(url, key)


@contextmanager
def _own_server(config: Path | None, overrides: tuple[str, ...]) -> Iterator[Endpoint]:
    """A server on a free port that ends with the talk. Its log goes to stderr from warnings on."""
    program = [sys.executable, "-c", "from engine.server.cli.main import main; main()", "serve"]
    settings = ["--set", "logging.level=warning", *(word for value in overrides for word in ("--set", value))]
    process = subprocess.Popen(
        [*program, *([str(config)] if config else []), *settings, "--host", "127.0.0.1", "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is for the answer, not for the server
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise EndpointError(f"the server did not start (exit code {process.wait()})")
        endpoint = Endpoint(line.rpartition(" ")[2].strip())
        _wait_ready(process, endpoint)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


def _wait_ready(process: subprocess.Popen[str], endpoint: Endpoint) -> None:
    if sys.stderr.isatty():
        click.echo("starting a server for this talk …", err=True)
    while process.poll() is None:
        try:
            asyncio.run(endpoint.get("/health/ready"))
        except EndpointError:
            time.sleep(_POLL)
        else:
            return
    raise EndpointError(f"the server did not start (exit code {process.returncode})")


@dataclass(slots=True)
class Talk:
    """A conversation and where it is held."""

    endpoint: Endpoint
    model: str
    system: str | None
    sampling: dict[str, Any]
    turns: list[dict[str, str]] = field(default_factory=list)

    async def say(self, text: str) -> None:
        """Send a message and print the answer as it comes; what was printed stays in the history."""
        self.turns.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        body = {"model": self.model, "messages": [*system, *self.turns], "stream": True}
        body |= {name: value for name, value in self.sampling.items() if value is not None}
        said: list[str] = []
        try:
            async for event in self.endpoint.events("/v1/chat/completions", body):
                for choice in event["choices"]:
                    said.append(choice["delta"].get("content") or "")
                    click.echo(said[-1], nl=False)
        except EndpointError:
            self.turns.pop()
            raise
        finally:
            if said:
                self.turns.append({"role": "assistant", "content": "".join(said)})
            click.echo()


def _converse(runner: asyncio.Runner, talk: Talk) -> None:
    """Read lines until the end."""
    terminal = sys.stdin.isatty()
    if terminal:
        click.echo(f"{talk.model} at {talk.endpoint.url}. {_GREETING}", err=True)
    while True:
        try:
            line = input("> " if terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line == "/exit":
            return
        if line == "/reset":
            talk.turns.clear()
        elif line:
            try:
                runner.run(talk.say(line))
            except KeyboardInterrupt:
                click.echo("(cut short)", err=True)
            except EndpointError as error:
                click.echo(f"engine: {error}", err=True)


__all__ = ["Talk", "command"]
