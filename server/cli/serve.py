"""`engine serve`: an OpenAI-compatible server from one YAML file."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import logging
import socket
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.client import CoreFailed, EngineClient
from engine.compose import resolve_source
from engine.config.components import check
from engine.config.load import LoadedConfig, load_config
from engine.config.model import EngineConfig
from engine.discovery import discover
from engine.errors import ResourceError
from engine.registry import Registry
from engine.server.cli.lock import DEFAULT as DEFAULT_LOCK
from engine.server.cli.lock import insist
from engine.specs.model_source import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


@click.command("serve")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of CONFIG; repeatable.")
@click.option("--host", help="Address to bind; as --set server.host=…")
@click.option("--port", type=int, help="Port to bind, 0 takes a free one; as --set server.port=…")
@click.option(
    "--locked",
    is_flag=False,
    flag_value=DEFAULT_LOCK,
    metavar="[FILE]",
    type=click.Path(path_type=Path),
    help=f"Refuse to start unless the plugins are those of this lock ({DEFAULT_LOCK} if none is named).",
)
def command(
    config: Path | None, overrides: tuple[str, ...], host: str | None, port: int | None, locked: Path | None
) -> None:
    """Serve a model to OpenAI clients.

    Without CONFIG the embedded default model is served on 127.0.0.1:8000. SIGTERM or Ctrl-C lets running requests
    finish; a second one ends at once.

    \b
    engine serve
    engine serve engine.yaml --port 9000
    engine serve --set model.source=path:/models/mine --set scheduler.max_running=16
    engine serve engine.yaml --locked
    """
    more = [f"server.{key}={json.dumps(value)}" for key, value in (("host", host), ("port", port)) if value is not None]
    loaded = load_config(config, [*overrides, *more])
    _log_to_stderr(loaded.config.logging.level)
    if locked is not None:
        insist(locked, discover(loaded.config.plugins.allow, loaded.config.plugins.deny))
    section = loaded.config.server
    with bind(section.host, section.port) as sock, asyncio.Runner(loop_factory=_fast_loop()) as runner:
        runner.run(_serve(loaded, sock))


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients that come before the server is up wait instead of being turned away.

    Raises:
        ResourceError: the address can't be had; the sentence says why.
    """
    try:
        # The protocol is given and not 0, or else asyncio would leave Nagle's algorithm on: 40 ms for every answer.
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ResourceError(f"the address {host!r} of server.host can't be used: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise ResourceError(_bind_failure(error, host, port)) from None
    return sock


def _bind_failure(error: OSError, host: str, port: int) -> str:
    where = f"port {port} on {host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program; stop that one or take another port (--port 0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"{where} may not be bound by this user; take a port of 1024 or above"
    return f"{where} can't be bound: {error.strerror}"


async def _serve(loaded: LoadedConfig, sock: socket.socket) -> None:
    config = loaded.config
    registry = Registry.discover(config.plugins.allow, config.plugins.deny)
    check(loaded, registry)
    files = resolve_source(config, registry, _progress, loaded.origins)
    client = await EngineClient.spawn(config, files.path)
    try:
        await _serve_with(client, config, registry, files, sock)
        failure = client.failed  # asked before closing, which ends the core too
    finally:
        await client.close()
    if failure is not None:
        raise CoreFailed(failure)


async def _serve_with(
    client: EngineClient, config: EngineConfig, registry: Registry, files: ModelFiles, sock: socket.socket
) -> None:
    # Imported only now: the core's process, which has most to do, starts while these imports run.
    from engine.server.app import create_app
    from engine.server.lifecycle import serve
    from engine.server.metrics import Metrics
    from engine.server.reading import load_texts
    from engine.server.state import ServerState

    model = config.model.name or files.name
    state = ServerState(client=client, config=config, model=model, metrics=Metrics(model))
    routers = []
    for name in config.server.routes:
        offer = registry.get("server_routes", name).offer
        routers.append((name, offer.build(offer.options(), state=state)))
    app = create_app(state, routers)
    click.echo(f"engine: http://{_shown(sock)}")
    await serve(state, app, sock, partial(load_texts, state, registry, files.path))


def _shown(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _progress(share: float, words: str) -> None:
    log.info("resolving the model: %s (%.0f%%)", words, share * 100)


def _log_to_stderr(level: str) -> None:
    logging.basicConfig(stream=sys.stderr, format="%(asctime)s %(levelname).1s %(name)s: %(message)s")
    logging.getLogger("engine").setLevel(level.upper())


def _fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's, if it is installed."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    loop: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return loop


__all__ = ["bind", "command"]
