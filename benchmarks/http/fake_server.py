"""The real HTTP process over a fake core, for measurements.

    python fake_server.py CORE INTERVAL [--profile FILE]

Pins itself to one CPU core and the fake core to another, prints its port and serves until its input ends.
"""

from __future__ import annotations

import asyncio
import cProfile
import os
import socket
import subprocess
import sys
from pathlib import Path

from engine.client import EngineClient
from engine.compose import resolve_source
from engine.config.load import load_config
from engine.registry import Registry
from engine.server.app import create_app
from engine.server.cli.serve import fast_loop
from engine.server.lifecycle import DrainingServer
from engine.server.listening import bind
from engine.server.metrics import Metrics
from engine.server.reading import load_texts
from engine.server.state import ServerState


def spawn(interval: str, core: int) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """The fake core and our end of its socket."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, str(Path(__file__).with_name("fake_core.py")), str(theirs.fileno()), interval]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    os.sched_setaffinity(process.pid, {core})
    return process, ours


async def serve(interval: str, other: int) -> None:
    config = load_config(None, ["kv_cache.use=paged"]).config
    registry = Registry.discover()
    process, ours = spawn(interval, other)
    ours.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=ours)
    client = EngineClient(process, reader, writer)
    await client.wait_ready()
    state = ServerState(client=client, config=config, model="fake", metrics=Metrics("fake"))
    state.tokenizer = load_texts(state, registry, resolve_source(config, registry, lambda share, words: None).path)
    sock = bind("127.0.0.1", 0)
    server = DrainingServer(create_app(state), state)
    print(sock.getsockname()[1], flush=True)

    async def watch() -> None:
        await asyncio.to_thread(sys.stdin.read)
        server.stop()

    watching = asyncio.create_task(watch())
    await server.serve(sockets=[sock])
    await watching
    await client.close()


def main() -> None:
    core, interval = int(sys.argv[1]), sys.argv[2]
    os.sched_setaffinity(0, {core})
    profile = cProfile.Profile() if "--profile" in sys.argv else None
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        if profile is not None:
            profile.enable()
        runner.run(serve(interval, 1 - core))
    if profile is not None:
        profile.disable()
        profile.dump_stats(sys.argv[-1])


if __name__ == "__main__":
    main()
