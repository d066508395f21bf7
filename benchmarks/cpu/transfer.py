"""KV between two processes, each connector beside the bare copy it is made of: `python benchmarks/cpu/transfer.py`.

The pages are those of a 1,500-token prompt of SmolLM2-135M in bfloat16 (35 MB), as neighbours and scattered. A fetch
counts from `fetch` to FETCHED, digests and acknowledgement included; the bare copies move the same bytes in the same
run, in turns with the connectors, and each figure is the median of the rounds.
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

import numpy as np
import torch

from engine.specs.kv_connector import EventKind, KVSchema, Role
from engine.testing.kv_end import End, EndSpec, RemoteEnd

SCHEMA = KVSchema(
    weights="smollm2",
    layers=30,
    page_size=16,
    parts=(("k", (3, 16, 64)), ("v", (3, 16, 64))),
    dtype="bfloat16",
    num_pages=512,
)
PAGES = -(-1500 // SCHEMA.page_size)
BYTES = PAGES * SCHEMA.layers * 2 * 3 * 16 * 64 * 2


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
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    makers: dict[str, Callable[[], Connector | BareSocket | BareMemory]] = {
        "bare memory copy": BareMemory,
        "local": lambda: Connector("local", 1.0),
        "local, nothing checked": lambda: Connector("local", 0.0),
        "bare socket copy": BareSocket,
        "tcp": lambda: Connector("tcp", 1.0),
        "tcp, nothing checked": lambda: Connector("tcp", 0.0),
    }
    ways = {name: make() for name, make in makers.items()}
    print(f"{platform.processor() or platform.machine()}, {BYTES / 1e6:.0f} MB in {PAGES} pages, median of {rounds}\n")
    print("| way | neighbours, ms | GB/s | scattered, ms | GB/s |\n|---|---|---|---|---|")
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
