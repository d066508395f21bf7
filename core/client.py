"""The HTTP process's end of the engine core: starts the child process and talks to it. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from engine.config.model import EngineConfig
from engine.errors import EngineError
from engine.messages import (
    Abort,
    Add,
    Control,
    Failed,
    FinishReason,
    FromCore,
    Output,
    Outputs,
    Phase,
    Ready,
    Reply,
    Start,
)
from engine.sampling_params import SamplingParams
from engine.wire import frame, receive_async

log = logging.getLogger(__name__)

_PATIENCE: Final = 10.0
"""Seconds that the child has to end after it was told to, before it is killed."""


class CoreFailed(EngineError):
    """The engine core could not start, or died."""

    exit_code = 3


class _Mailbox:
    """The news of one request for its one reader. An asyncio.Queue would cost twice as much for every token."""

    __slots__ = ("_reader", "news")

    def __init__(self) -> None:
        self.news: deque[Output] = deque()
        self._reader: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Deliver something."""
        self.news.append(output)
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def arrival(self) -> asyncio.Future[None]:
        """Done once there is something again; ask only while there is nothing."""
        self._reader = asyncio.get_running_loop().create_future()
        return self._reader


class EngineClient:
    """One engine core process. All methods belong to one event loop."""

    def __init__(
        self, process: subprocess.Popen[bytes], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._process, self._reader, self._writer = process, reader, writer
        self._streams: dict[str, _Mailbox] = {}
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._ended = asyncio.Event()  # ready or failed
        self.phase = Phase("starting", 0.0)
        self.ready: Ready | None = None
        self.failed: str | None = None
        self.running = self.waiting = 0
        self._listener = asyncio.create_task(self._listen(), name="engine core")

    @classmethod
    async def spawn(cls, config: EngineConfig, model_path: Path) -> Self:
        """Start the child and send it the configuration; returns before it is ready."""
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-m", "engine.process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a Ctrl-C in the terminal reaches this process only, which then drains
            )
        ours.setblocking(False)
        reader, writer = await asyncio.open_connection(sock=ours)
        writer.write(frame(Start(config.model_dump(mode="json", exclude_unset=True), str(model_path))))
        return cls(process, reader, writer)

    async def wait_ready(self) -> Ready:
        """Wait until requests are accepted.

        Raises:
            CoreFailed: with the reason, when that will not happen.
        """
        await self._ended.wait()
        if self.ready is None or self.failed is not None:
            raise CoreFailed(self.failed or "the engine core ended")
        return self.ready

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        kv_transfer: dict[str, Any] | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> AsyncGenerator[Output]:
        """News of one request until its finish reason; closing the iterator early aborts the request."""
        if self.failed is not None:
            raise CoreFailed(self.failed)
        mailbox = self._streams[request_id] = _Mailbox()
        finished = False
        try:
            self._send(Add(request_id, prompt, params, priority, cache_salt, kv_transfer, tenant, weight))
            while not finished:
                if not mailbox.news:
                    await mailbox.arrival()
                output = mailbox.news.popleft()
                finished = output.finish_reason is not None
                yield output
        finally:
            self._streams.pop(request_id, None)
            if not finished:
                await self.abort(request_id)

    async def abort(self, request_id: str) -> None:
        """Make the core forget a request; harmless if it has ended."""
        if self.failed is None:
            self._send(Abort([request_id]))

    async def control(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Ask the core for something; the verbs are those of `engine.control`."""
        if self.failed is not None:
            raise CoreFailed(self.failed)
        number = next(self._numbers)
        reply: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._replies[number] = reply
        self._send(Control(number, verb, arguments))
        try:
            return await reply
        finally:
            self._replies.pop(number, None)

    async def close(self) -> None:
        """Stop the child, by force after a while."""
        with contextlib.suppress(ConnectionError):
            self._send(Control(-1, "shutdown"))
            await self._writer.drain()
        try:
            await asyncio.wait_for(asyncio.shield(self._listener), _PATIENCE)
        except TimeoutError:
            log.warning("the engine core did not end within %.0f s and is killed", _PATIENCE)
            self._process.kill()
            self._listener.cancel()
        self._writer.close()
        await asyncio.to_thread(self._process.wait)

    def _send(self, message: msgspec.Struct) -> None:
        if not self._writer.is_closing():  # if it is, the child is gone and `_mourn` is about to say so
            self._writer.write(frame(message))

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(FromCore)
        while (message := await receive_async(self._reader, decoder)) is not None:
            match message:
                case Outputs():
                    self._deliver(message)
                case Phase():
                    self.phase = message
                case Ready():
                    self.ready = message
                    self._ended.set()
                case Failed():
                    self.failed = message.message
                case Reply():
                    if (reply := self._replies.get(message.number)) is not None and not reply.done():
                        reply.set_result(message.body)
        await self._mourn()

    def _deliver(self, message: Outputs) -> None:
        self.running, self.waiting = message.running, message.waiting
        for output in message.outputs:
            if (mailbox := self._streams.get(output.request_id)) is not None:
                mailbox.put(output)

    async def _mourn(self) -> None:
        """The child is gone: whoever waits for it hears why."""
        code = await asyncio.to_thread(self._process.wait)
        if self.failed is None:
            self.failed = _obituary(code)
        self._ended.set()
        for request_id, mailbox in self._streams.items():
            mailbox.put(Output(request_id, finish_reason=FinishReason.ERROR, error=self.failed))
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(CoreFailed(self.failed))


def _obituary(code: int) -> str:
    """Why a child that said nothing is gone, by its exit code: minus the signal's number if one killed it."""
    if code >= 0:
        return f"the engine core process ended with code {code}; the log above says why"
    name = next((s.name for s in signal.Signals if s == -code), f"signal {-code}")
    if code == -signal.SIGKILL:
        return (
            f"the engine core process was killed by {name}: by somebody, or by the system when memory runs out "
            "(then lower kv_cache.memory)"
        )
    return f"the engine core process was killed by {name}"


__all__ = ["CoreFailed", "EngineClient"]
