"""The HTTP side's end of a core process that is gone, on the event loops that may run it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import msgspec
import pytest
import uvloop

from engine.client import CoreFailed, EngineClient
from engine.messages import Abort, FinishReason, Output, Outputs, ToCore
from engine.sampling_params import SamplingParams
from engine.wire import frame, receive


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_what_is_asked_of_a_core_that_just_died_fails_with_the_reason(loop: type[asyncio.AbstractEventLoop]) -> None:
    async def run() -> None:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen([sys.executable, "-c", "input(); raise SystemExit(7)"], stdin=subprocess.PIPE)
        client = EngineClient(process, *await asyncio.open_connection(sock=ours))
        theirs.close()  # the socket goes before the process does
        await asyncio.sleep(0.05)
        assert client.failed is None
        asked = asyncio.create_task(client.control("stats"))
        stream = client.generate([1], SamplingParams(), request_id="a")
        first = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.05)
        process.communicate(b"\n")
        assert "code 7" in (await first).error
        with pytest.raises(CoreFailed, match="code 7"):
            await asked
        with pytest.raises(CoreFailed, match="code 7"):
            await client.wait_ready()
        await client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_news_of_many_requests_reach_their_readers_in_order(loop: type[asyncio.AbstractEventLoop]) -> None:
    async def read(client: EngineClient, name: str) -> list[int]:
        outputs = client.generate([1], SamplingParams(), request_id=name)
        return [token async for output in outputs for token in output.token_ids]

    async def run() -> None:
        ours, theirs = socket.socketpair()
        process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
        client = EngineClient(process, *await asyncio.open_connection(sock=ours))
        readers = [asyncio.create_task(read(client, name)) for name in "abc"]
        left_early = client.generate([1], SamplingParams(), request_id="d")
        first = asyncio.create_task(anext(left_early))
        await asyncio.sleep(0.01)
        for step in range(50):
            reason = FinishReason.LENGTH if step == 49 else None
            news = [Output(name, token_ids=[step], finish_reason=reason) for name in "abc"]
            theirs.sendall(frame(Outputs([*news, Output("d", token_ids=[step])], 4, 0)))
            if step % 3 == 0:  # else several steps arrive at once
                await asyncio.sleep(0)
        assert await asyncio.gather(*readers) == [list(range(50))] * 3
        assert (await first).token_ids == [0]
        await left_early.aclose()
        await asyncio.sleep(0.01)
        decoder = msgspec.msgpack.Decoder(ToCore)
        asked = [receive(theirs, decoder) for _ in range(5)]
        assert [message.request_id for message in asked[:4]] == ["a", "b", "c", "d"]
        assert asked[4] == Abort(["d"])
        theirs.close()
        process.communicate(b"\n")
        await client.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(run())
