"""What the HTTP process adds to each token: 256 streams over a fake core whose steps take the same time.

    python benchmarks/http/overhead.py [--streams 256] [--rate 20000] [--seconds 10] [--path chat]

The server process runs on CPU core 0 alone, with its real tokenizer, routes and sockets; the fake core and the client
share core 1. Added is the gap between two tokens of a stream as its client sees it, less the time of a step. `busy` is
the server's CPU time by the time that passed: near 1 it can't keep up. `robbed` is how long the server was ready to run
while other programs had its core; unless it is near 0, the rest says more of them.
`chrt -f 1` in front of the command keeps them off.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import rich
import uvloop
from rich.table import Table

SERVER_CORE, CLIENT_CORE = 0, 1
BODIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "go"}]}),
    "completions": ("/v1/completions", {"prompt": [1, 2, 3]}),
    "messages": ("/v1/messages", {"messages": [{"role": "user", "content": "go"}]}),
    "responses": ("/v1/responses", {"input": "go", "store": False}),
}
LIMIT = {"responses": "max_output_tokens"}
MARK = {"chat": b'"content":"', "completions": b'"text":"', "messages": b"text_delta", "responses": b'text.delta",'}


@dataclass
class Stream(asyncio.Protocol):
    """One client: writes its request and notes when tokens arrive. Does as little as it can."""

    request: bytes
    mark: bytes
    arrivals: list[float] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.write(self.request)  # type: ignore[attr-defined]  # uvloop's are no asyncio.Transport

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        for _ in range(data.count(self.mark)):
            self.arrivals.append(now)

    def connection_lost(self, exc: Exception | None) -> None:
        self.done.set()


@dataclass(frozen=True)
class Cpu:
    """What the kernel says of a process, in seconds."""

    used: float
    robbed: float
    at: float

    @classmethod
    def of(cls, pid: int) -> Cpu:
        used, robbed, _ = Path(f"/proc/{pid}/schedstat").read_text().split()
        return cls(int(used) / 1e9, int(robbed) / 1e9, time.monotonic())


async def load(port: int, api: str, count: int, tokens: int) -> list[Stream]:
    """All streams from start to end."""
    path, body = BODIES[api]
    data = json.dumps({**body, "model": "fake", "stream": True, LIMIT.get(api, "max_tokens"): tokens}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(data)}\r\n\r\n"
    loop = asyncio.get_running_loop()
    streams = [Stream(head.encode() + data, MARK[api]) for _ in range(count)]
    for stream in streams:
        await loop.create_connection(lambda stream=stream: stream, "127.0.0.1", port)  # type: ignore[misc]
    for stream in streams:
        await stream.done.wait()
    return streams


def quantile(values: list[float], share: float) -> float:
    """Of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]


def summary(streams: list[Stream], step: float, begin: float, end: float) -> dict[str, float]:
    """Over the tokens that arrived between two moments; milliseconds."""
    added, count = [], 0
    for stream in streams:
        times = [t for t in stream.arrivals if begin <= t <= end]
        added += [1000 * (b - a - step) for a, b in pairwise(times)]
        count += len(times)
    added.sort()
    return {"tokens/s": count / (end - begin), **{f"p{q}": quantile(added, q / 100) for q in (50, 90, 99, 100)}}


def measure(path: str, given: argparse.Namespace) -> dict[str, float]:
    """One server, one load."""
    step = given.streams / given.rate
    tokens = round((given.seconds + 2 * given.warmup) / step)
    command = [sys.executable, str(Path(__file__).with_name("fake_server.py")), str(SERVER_CORE), str(step)]
    if given.profile:
        command += ["--profile", str(given.profile)]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert server.stdin is not None
    assert server.stdout is not None

    async def run(port: int) -> tuple[list[Stream], Cpu, Cpu]:
        loading = asyncio.create_task(load(port, path, given.streams, tokens))
        await asyncio.sleep(given.warmup)
        before = Cpu.of(server.pid)
        await asyncio.sleep(given.seconds)
        after = Cpu.of(server.pid)
        return await loading, before, after

    try:
        streams, before, after = uvloop.run(run(int(server.stdout.readline())))
    finally:
        server.stdin.close()
        server.wait(30)
    found = summary(streams, step, before.at, after.at)
    took, used = after.at - before.at, after.used - before.used
    return {
        **found,
        "busy": used / took,
        "robbed": (after.robbed - before.robbed) / took,
        "us/token": 1e6 * used / (found["tokens/s"] * took),
        "lost": sum(max(0, tokens - len(stream.arrivals)) for stream in streams),
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--streams", type=int, default=256)
    arguments.add_argument("--rate", type=float, default=20000, help="tokens per second of all streams together")
    arguments.add_argument("--seconds", type=float, default=10)
    arguments.add_argument("--warmup", type=float, default=2)
    arguments.add_argument("--path", choices=BODIES, action="append", help="repeatable; all if none is named")
    arguments.add_argument("--profile", type=Path, help="write the server's cProfile here")
    given = arguments.parse_args()
    os.sched_setaffinity(0, {CLIENT_CORE})
    title = f"{given.streams} streams at {given.rate:,.0f} tokens/s; added time between tokens, ms"
    table, rows = Table(title=title), {path: measure(path, given) for path in given.path or BODIES}
    for name in ("", *next(iter(rows.values()))):
        table.add_column(name, justify="right")
    for path, found in rows.items():
        table.add_row(path, *(f"{v:,.0f}" if v >= 1000 or not v else f"{v:.2f}" for v in found.values()))
    rich.print(table)


if __name__ == "__main__":
    main()
