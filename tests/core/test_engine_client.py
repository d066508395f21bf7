"""The HTTP side's end of a core process that is gone, on the event loops that may run it."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys

import pytest
import uvloop

from engine.client import CoreFailed, EngineClient
from engine.sampling_params import SamplingParams


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
