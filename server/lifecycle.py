"""From the bound port to the exit code: loading, serving, draining."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sized
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol

import uvicorn
from fastapi import FastAPI

from engine.config.model import ListenSection
from engine.server.http import PatientHttp
from engine.server.state import ServerState

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_TICK: Final = 0.05
"""Seconds between looks at what has changed."""

_KEEP_ALIVE: Final = 75
"""Seconds that an idle connection is kept: longer than clients keep theirs, so that none meets a closing door."""

_LAST_WORDS: Final = 2.0
"""Seconds for answers that were cut off to tell their clients."""


class Draining(Protocol):
    """What stands behind a server that drains: an engine's state, or a router's."""

    draining: bool
    stopping: bool

    @property
    def active(self) -> Sized:
        """Answers under way."""

    @property
    def listening(self) -> ListenSection:
        """The part of the configuration that says where to listen."""

    def stop_active(self) -> None:
        """Cut off the answers under way."""


class DrainingServer(uvicorn.Server):
    """A server whose first signal begins a drain, and whose second ends it.

    While it drains, it is not ready and refuses new requests; those under way may finish.
    """

    def __init__(self, app: FastAPI, state: Draining) -> None:
        tls = state.listening.tls
        super().__init__(
            uvicorn.Config(
                app,
                http=PatientHttp,
                lifespan="off",
                ws="none",
                access_log=False,
                log_config=None,
                server_header=False,
                ssl_certfile=tls.cert,
                ssl_keyfile=tls.key,
                timeout_keep_alive=_KEEP_ALIVE,
                timeout_graceful_shutdown=_LAST_WORDS,  # type: ignore[arg-type]
            )
        )
        self._state = state
        self._loop = asyncio.get_running_loop()
        self._drain: asyncio.Task[None] | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal arrived. Not passed on to uvicorn, which would end the process by raising it again."""
        self._loop.call_soon_threadsafe(self._signalled)

    def _signalled(self) -> None:
        if self._drain is None:
            self._drain = asyncio.create_task(self.drain())
        else:
            self.stop()

    async def drain(self) -> None:
        """Let the answers under way finish, for a while, then stop."""
        self._state.draining = self._state.stopping = True
        seconds = self._state.listening.drain_seconds
        if self._state.active:
            log.info("draining: %d answers may take %.0f s to finish", len(self._state.active), seconds)
        end = self._loop.time() + seconds
        while self._state.active and self._loop.time() < end and not self.should_exit:
            await asyncio.sleep(_TICK)
        self.stop()

    def stop(self) -> None:
        """Stop now: answers under way are cut off with an error."""
        self._state.draining = self._state.stopping = True
        self._state.stop_active()
        self.should_exit = True


async def serve(state: ServerState, app: FastAPI, sock: socket.socket, load_tokenizer: Callable[[], Tokenizer]) -> None:
    """Serve until a signal ends it or the engine fails (then `state.client.failed` says why).

    Raises:
        EngineError: the tokenizer can't be loaded.
    """
    server = DrainingServer(app, state)

    async def load() -> None:
        state.tokenizer = await asyncio.to_thread(load_tokenizer)

    loading = asyncio.create_task(load())
    watching = asyncio.create_task(_watch(state, server, loading))
    try:
        await server.serve(sockets=[sock])
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        if state.tracing is not None:
            await asyncio.to_thread(state.tracing.close)
    if loading.done():
        loading.result()


async def _watch(state: ServerState, server: DrainingServer, loading: asyncio.Task[None]) -> None:
    """Log each phase once; stop the server when the engine or the tokenizer fails."""
    phase, announced = "", False
    while True:
        if state.client.failed is not None or (loading.done() and loading.exception() is not None):
            server.stop()
            return
        state.startup.observe(state.client.phase, state.loaded)
        if state.client.phase.name != phase:
            phase = state.client.phase.name
            log.info("%s%s", phase, f": {state.client.phase.detail}" if state.client.phase.detail else "")
        if state.loaded and not announced:
            announced = True
            log.info("serving %s", state.model)
        await asyncio.sleep(_TICK)


__all__ = ["DrainingServer", "serve"]
