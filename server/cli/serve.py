"""`engine serve`: an OpenAI-compatible server from one YAML file."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import socket
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from engine.client import CoreFailed, EngineClient
from engine.compose import resolve_source
from engine.config.components import check
from engine.config.explain import explain
from engine.config.load import LoadedConfig, load_config
from engine.discovery import discover
from engine.errors import ConfigError
from engine.logs import configure
from engine.registry import Registry
from engine.server.cli.lock import DEFAULT as DEFAULT_LOCK
from engine.server.cli.lock import insist
from engine.server.listening import bind, listen, shown
from engine.specs.model_source import ModelFiles

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)

_ROLES: Final = {"prefill": "producer", "decode": "consumer", "both": "both"}
"""What an engine does among others, and what its KV connectors then do."""


@click.command("serve")
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of CONFIG; repeatable.")
@click.option("--host", help="Address to bind; as --set server.host=…")
@click.option("--port", type=int, help="Port to bind, 0 takes a free one; as --set server.port=…")
@click.option(
    "--role",
    type=click.Choice(list(_ROLES)),
    help="Compute prompts for other engines, go on from their KV, or both: the role of every KV connector of CONFIG.",
)
@click.option(
    "--locked",
    is_flag=False,
    flag_value=DEFAULT_LOCK,
    metavar="[FILE]",
    type=click.Path(path_type=Path),
    help=f"Refuse to start unless the plugins are those of this lock ({DEFAULT_LOCK} if none is named).",
)
def command(
    config: Path | None,
    overrides: tuple[str, ...],
    host: str | None,
    port: int | None,
    role: str | None,
    locked: Path | None,
) -> None:
    """Serve a model to OpenAI clients.

    Without CONFIG the embedded default model is served on 127.0.0.1:8000. SIGTERM or Ctrl-C lets running requests
    finish; a second one ends at once.

    \b
    engine serve
    engine serve engine.yaml --port 9000
    engine serve --set model.source=path:/models/mine --set scheduler.max_running=16
    engine serve engine.yaml --role prefill --port 8101
    engine serve engine.yaml --locked
    """
    more = [f"server.{key}={json.dumps(value)}" for key, value in (("host", host), ("port", port)) if value is not None]
    loaded = load_config(config, [*overrides, *more])
    if role is not None:
        loaded = load_config(config, [*overrides, *more, *_role_overrides(loaded, role)])
    configure(loaded.config.logging.level, loaded.config.logging.format, "http")
    if locked is not None:
        insist(locked, discover(loaded.config.plugins.allow, loaded.config.plugins.deny))
    section = loaded.config.server
    with listen(section) as sock, asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_serve(loaded, sock))


def _role_overrides(loaded: LoadedConfig, role: str) -> list[str]:
    """`--set` values that give every KV connector the role.

    Raises:
        ConfigError: there is no connector that could have one.
    """
    count = len(loaded.config.kv_connectors)
    if not count:
        raise ConfigError(f"--role {role} needs a KV connector; add one, such as kv_connectors: [local]")
    return [f"kv_connectors.{i}.role={_ROLES[role]}" for i in range(count)]


async def _serve(loaded: LoadedConfig, sock: socket.socket) -> None:
    config = loaded.config
    registry = Registry.discover(config.plugins.allow, config.plugins.deny)
    check(loaded, registry)
    files = resolve_source(config, registry, _progress, loaded.origins)
    client = await EngineClient.spawn(config, files.path)
    try:
        await _serve_with(client, loaded, registry, files, sock)
        failure = client.failed  # asked before closing, which ends the core too
    finally:
        await client.close()
    if failure is not None:
        raise CoreFailed(failure)


async def _serve_with(
    client: EngineClient, loaded: LoadedConfig, registry: Registry, files: ModelFiles, sock: socket.socket
) -> None:
    # Imported only now: the core's process, which has most to do, starts while these imports run.
    from engine.server.app import create_app
    from engine.server.exchange import log_fields
    from engine.server.lifecycle import serve
    from engine.server.limits import build_limiter
    from engine.server.metrics import Metrics
    from engine.server.reading import load_texts
    from engine.server.state import ServerState
    from engine.server.tracing import build_tracing

    config = loaded.config
    configure(config.logging.level, config.logging.format, "http", log_fields)
    model = config.model.name or files.name
    state = ServerState(
        client=client,
        config=config,
        model=model,
        metrics=Metrics(model),
        limiter=build_limiter(config, registry),
        tracing=build_tracing(config.tracing, model),
        settings=explain(loaded, registry),
    )
    routers = []
    for name in config.server.routes:
        owned = registry.get("server_routes", name)
        routers.append((name, owned.build(owned.offer.options(), state=state)))
    app = create_app(state, routers)
    click.echo(f"engine: {shown(sock, tls=config.server.tls.cert is not None)}")
    await serve(state, app, sock, partial(load_texts, state, registry, files.path))


def _progress(share: float, words: str) -> None:
    log.info("resolving the model: %s (%.0f%%)", words, share * 100)


def fast_loop() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop's where it exists, which is not on Windows; None is asyncio's own."""
    if importlib.util.find_spec("uvloop") is None:
        return None
    loop: Callable[[], asyncio.AbstractEventLoop] = importlib.import_module("uvloop").new_event_loop
    return loop


__all__ = ["bind", "command", "fast_loop"]
