"""`engine route`: one address over several engines."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.logs import configure
from engine.server.cli.serve import fast_loop
from engine.server.listening import listen, shown
from engine.server.router.config import load_router

if TYPE_CHECKING:
    from engine.server.router.config import RouterConfig

log = logging.getLogger(__name__)


@click.command("route")
@click.argument("config", type=click.Path(path_type=Path))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a value of CONFIG; repeatable.")
@click.option("--host", help="Address to bind; as --set server.host=…")
@click.option("--port", type=int, help="Port to bind, 0 takes a free one; as --set server.port=…")
def command(config: Path, overrides: tuple[str, ...], host: str | None, port: int | None) -> None:
    """Send the requests of OpenAI clients to several engines.

    CONFIG names the engines:

    \b
    server: {port: 8000}
    prefill: [http://10.0.0.1:8000]            # engine serve … --role prefill
    decode: [http://10.0.0.2:8000, http://10.0.0.3:8000]   # … --role decode
    handover: {mode: auto}                     # auto, always or never

    A prompt is computed by a prefill engine, if that costs less than computing it where the answer is written; its KV
    goes from engine to engine, never through the router. Without `prefill` the router spreads requests over `decode`.
    When an engine dies, its requests go to another one; when all prefill engines are gone, decode engines do it alone.

    \b
    engine route router.yaml
    engine route router.yaml --port 9000 --set handover.mode=always
    curl localhost:8000/health/ready     200 as soon as one engine takes requests
    curl localhost:8000/engine/transfer -H 'Authorization: Bearer ADMIN_KEY'
    """
    more = [f"server.{key}={json.dumps(value)}" for key, value in (("host", host), ("port", port)) if value is not None]
    loaded = load_router(config, [*overrides, *more])
    configure(loaded.logging.level, loaded.logging.format, "router")
    with listen(loaded.server) as sock, asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_route(loaded, sock))


async def _route(config: RouterConfig, sock: socket.socket) -> None:
    from engine.server.lifecycle import DrainingServer
    from engine.server.router.app import create_router_app
    from engine.server.router.probing import Prober
    from engine.server.router.state import RouterState, open_http

    async with open_http(config) as http:
        state = RouterState(config, http)
        watching = asyncio.create_task(Prober(http, config.probe).watch(state.workers))
        click.echo(f"engine: {shown(sock, tls=config.server.tls.cert is not None)}")
        try:
            await DrainingServer(create_router_app(state), state).serve(sockets=[sock])
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


__all__ = ["command"]
