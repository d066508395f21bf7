"""KV between two processes, each connector beside the bare copy it is made of: `python benchmarks/cpu/transfer.py`.

The pages are those of a 1,500-token prompt of SmolLM2-135M in bfloat16 (35 MB), as neighbours and scattered. A fetch
counts from `fetch` to FETCHED, digests and acknowledgement included; the bare copies move the same bytes in the same
run, in turns with the connectors, and each figure is the median of the rounds. What uses NIXL is measured one way after
the other: its threads spin.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import socket
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from engine.plugins.kv_connectors.rdma.agent import open_agent
from engine.specs.kv_connector import EventKind, KVSchema, Role
from engine.testing.kv_end import End, EndSpec, RemoteEnd
from engine.transport.grid import stretches
from engine.transport.schema import Cut

SCHEMA = KVSchema(
    weights="smollm2",
    layers=30,
    page_size=16,
    parts=(("k", (3, 16, 64)), ("v", (3, 16, 64))),
    dtype="bfloat16",
    num_pages=512,
)
PAGES = -(-1500 // SCHEMA.page_size)
PARTS = SCHEMA.layers * 2
BYTES = PAGES * PARTS * 3 * 16 * 64 * 2


class Connector:
    """A producer in another process and a consumer in this one."""

    def __init__(self, name: str, check: float) -> None:
        options = json.dumps({"check": check})
        spec = EndSpec(module=f"engine.plugins.kv_connectors.{name}", offer=name, options=options, schema=SCHEMA)
        self._producer = RemoteEnd(replace(spec, role=Role.PRODUCER, engine_id="engine-p"))
        self._consumer = End(replace(spec, role=Role.CONSUMER, engine_id="engine-c"))
        self._count = 0

    def fetch(self, source: list[int], target: list[int]) -> float:
        """Seconds of one fetch whose digests were made before."""
        self._count += 1
        name = f"r{self._count}"
        handle = self._producer.call("publish", name, source)
        time.sleep(0.1)
        begun = time.perf_counter()
        self._consumer.fetch(name, handle, target)
        ended = self._consumer.fetched(name)
        took = time.perf_counter() - begun
        assert ended.kind is EventKind.FETCHED, ended.reason
        self._producer.call("withdraw", name)
        return took

    def close(self) -> None:
        """End both."""
        self._consumer.close()
        self._producer.close()


class BareSocket:
    """As many bytes through one loopback connection, from one buffer into another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_send, args=(theirs,), daemon=True)
        self._process.start()
        self._sock = socket.create_connection(self._pipe.recv())
        self._buffer = np.ones(BYTES, np.uint8).data

    def fetch(self, source: list[int], target: list[int]) -> float:
        """Seconds until everything is in the buffer."""
        begun, at = time.perf_counter(), 0
        self._pipe.send(True)
        while at < BYTES:
            at += self._sock.recv_into(self._buffer[at:])
        return time.perf_counter() - begun

    def close(self) -> None:
        """End the sender."""
        self._process.kill()
        self._process.join()
        self._sock.close()


def _send(pipe: Connection) -> None:
    buffer = np.ones(BYTES, np.uint8)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pipe.send(listener.getsockname())
        sock, _ = listener.accept()
    while pipe.recv():
        sock.sendall(buffer)


class BareNixl:
    """The same runs of bytes, read by NIXL out of another process's memory into one buffer, and nothing else.

    `progress`: the reader has NIXL's thread too, as agents have unless told otherwise.
    """

    def __init__(self, *, progress: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_hold, args=(theirs,), daemon=True)
        self._process.start()
        self._agent: Any = open_agent(progress=progress)
        self._buffer = torch.ones(BYTES, dtype=torch.uint8)
        self._registered = self._agent.register_memory(self._buffer)
        metadata, self._base = self._pipe.recv()
        name = self._agent.add_remote_agent(metadata)
        self._peer = name.decode() if isinstance(name, bytes) else name

    def fetch(self, source: list[int], target: list[int]) -> float:
        """Seconds until everything is in the buffer."""
        width = BYTES // PAGES // PARTS
        begun = time.perf_counter()
        (runs, *_) = stretches(source, [width], [width], [Cut(1, 1)])
        spans = np.array(runs, np.uint64)
        first = (spans[None, :, 0] + np.arange(PARTS, dtype=np.uint64)[:, None] * SCHEMA.num_pages * width).ravel()
        lengths = np.tile(spans[:, 1] - spans[:, 0], PARTS)
        nowhere = np.zeros_like(lengths)  # the device
        there = np.stack([first + self._base, lengths, nowhere], 1)
        here = np.stack([np.cumsum(lengths) - lengths + self._buffer.data_ptr(), lengths, nowhere], 1)
        descriptors = [self._agent.get_xfer_descs(runs.astype(np.uint64), "DRAM") for runs in (here, there)]
        read = self._agent.initialize_xfer("READ", *descriptors, self._peer)
        state = self._agent.transfer(read)
        while state == "PROC":
            time.sleep(0.0002)
            state = self._agent.check_xfer_state(read)
        took = time.perf_counter() - begun
        assert state == "DONE", state
        self._agent.release_xfer_handle(read)
        return took

    def close(self) -> None:
        """End the holder."""
        self._agent.deregister_memory(self._registered)
        self._agent = None  # its thread ends
        self._process.kill()
        self._process.join()


def _hold(pipe: Connection) -> None:
    agent, pool = open_agent(), torch.ones(BYTES // PAGES * SCHEMA.num_pages, dtype=torch.uint8)
    agent.register_memory(pool)
    pipe.send((bytes(agent.get_agent_metadata()), pool.data_ptr()))
    pipe.recv()


class BareMemory:
    """As many bytes from one place in memory to another."""

    def __init__(self) -> None:
        self._from, self._to = np.ones(BYTES, np.uint8), np.ones(BYTES, np.uint8)

    def fetch(self, source: list[int], target: list[int]) -> float:
        """Seconds of the copy."""
        begun = time.perf_counter()
        np.copyto(self._to, self._from)
        return time.perf_counter() - begun

    def close(self) -> None:
        """Nothing to end."""


Way = Connector | BareSocket | BareMemory | BareNixl


def pages(scattered: bool) -> tuple[list[int], list[int]]:
    """Where the pages lie at the producer and at the consumer."""
    if not scattered:
        return list(range(PAGES)), list(range(100, 100 + PAGES))
    draw = random.Random(1)
    return draw.sample(range(SCHEMA.num_pages), PAGES), draw.sample(range(SCHEMA.num_pages), PAGES)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="the ways whose names hold one of these, comma-separated")
    args = parser.parse_args()
    rounds, only = args.rounds, args.only.split(",")
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Way]] = {
        "bare memory copy": BareMemory,
        "local": lambda: Connector("local", 1.0),
        "local, nothing checked": lambda: Connector("local", 0.0),
        "bare socket copy": BareSocket,
        "tcp": lambda: Connector("tcp", 1.0),
        "tcp, nothing checked": lambda: Connector("tcp", 0.0),
        "bare NIXL reads": lambda: BareNixl(progress=False),
        "bare NIXL reads, its thread in both": lambda: BareNixl(progress=True),
        "rdma": lambda: Connector("rdma", 1.0),
        "rdma, nothing checked": lambda: Connector("rdma", 0.0),
    }
    wanted = [name for name in makers if any(part in name for part in only)]
    quiet = [name for name in wanted if not _spins(name)]
    print(f"{platform.processor() or platform.machine()}, {BYTES / 1e6:.0f} MB in {PAGES} pages, median of {rounds}\n")
    print("| way | neighbours, ms | GB/s | scattered, ms | GB/s |\n|---|---|---|---|---|")
    for names in [quiet, *([name] for name in wanted if _spins(name))]:
        measure({name: makers[name] for name in names}, rounds)


def _spins(name: str) -> bool:
    """Whether threads of NIXL look for work without a rest, so that nothing else may be measured meanwhile."""
    return "NIXL" in name or "rdma" in name


def measure(makers: dict[str, Callable[[], Way]], rounds: int) -> None:
    """Rows of the table, measured in turns."""
    ways = {name: make() for name, make in makers.items()}
    seconds: dict[tuple[str, bool], list[float]] = {}
    for _ in range(rounds + 1):
        for name, way in ways.items():
            for scattered in (False, True):
                seconds.setdefault((name, scattered), []).append(way.fetch(*pages(scattered)))
    for name in ways:
        cells = [statistics.median(seconds[name, scattered][1:]) for scattered in (False, True)]
        print("| " + " | ".join([name, *(f"{1e3 * s:.1f} | {BYTES / s / 1e9:.2f}" for s in cells)]) + " |")
    for way in ways.values():
        way.close()


if __name__ == "__main__":
    main()
