"""Clients that come and go at random moments, in every rude way: nothing of theirs may stay.

    python benchmarks/http/storm.py [--count 500] [--at-once 32] [--seed 1]

Starts the default model, storms it while a polite neighbour asks the same greedy question again and again, then checks
that its answers never changed, that no request runs and no page is held, and that the server has the sockets and tasks
(threads, open files) that it had before.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import struct
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

PATHS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "count to a thousand"}], "max_tokens": 150},
    "/v1/completions": {"prompt": ["one two", "three four"], "n": 2, "max_tokens": 150},
    "/v1/messages": {"messages": [{"role": "user", "content": "count"}], "max_tokens": 150},
    "/v1/responses": {"input": "count", "max_output_tokens": 150},
}


def visit(port: int, seed: int) -> None:
    """One client: connects, says something or a part of it, reads a little or nothing, and leaves."""
    chance = random.Random(seed)
    path = chance.choice(list(PATHS))
    body = json.dumps({**PATHS[path], "stream": chance.random() < 0.7, "temperature": 0}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    data = head + body
    if chance.random() < 0.3:
        data = data[: chance.randrange(len(data))]
    with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
        if chance.random() < 0.3:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves with a reset
        cut = chance.randrange(len(data) + 1)
        sock.sendall(data[:cut])
        time.sleep(chance.choice((0, 0, 0.005)))
        sock.sendall(data[cut:])
        time.sleep(chance.choice((0, 0.001, 0.02, 0.1, 0.4)))
        sock.settimeout(0.2)
        try:
            for _ in range(chance.choice((0, 0, 1, 3))):
                sock.recv(chance.choice((1, 500, 65536)))
            if chance.random() < 0.2:
                sock.shutdown(socket.SHUT_WR)
                sock.recv(1000)
        except (TimeoutError, ConnectionError):
            return  # nothing came in time, or the server was first to leave


def storm(port: int, count: int, at_once: int, seed: int) -> None:
    """All visits."""
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda i: visit(port, seed * 1_000_000 + i), range(count)))


class Neighbour:
    """Asks the same question over and over while it is entered; afterwards `answers` has every different answer."""

    def __init__(self, port: int, body: dict[str, object]) -> None:
        self._url, self.body = f"http://127.0.0.1:{port}/v1/completions", body
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers: set[str] = set()
        self.asked = 0

    def _ask(self) -> None:
        with httpx.Client(timeout=120, trust_env=False) as http:
            while not self._stop.is_set():
                answer = http.post(self._url, json=self.body)
                self.answers.add(answer.json()["choices"][0]["text"] if answer.status_code == 200 else answer.text)
                self.asked += 1

    def __enter__(self) -> Neighbour:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


def held(pid: int) -> dict[str, int]:
    """What a process holds."""
    return {what: len(list(Path(f"/proc/{pid}/{what}").iterdir())) for what in ("fd", "task")}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=500)
    arguments.add_argument("--at-once", type=int, default=32)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    command = [str(Path(sys.executable).with_name("engine")), "serve", "--port", "0", "--set", "logging.level=warning"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        port = int(url.rsplit(":", 1)[1])
        with httpx.Client(base_url=url, timeout=60, trust_env=False) as http:
            while http.get("/health/ready").status_code != 200:
                time.sleep(0.1)
            neighbour = Neighbour(port, {"prompt": "The capital of France is", "max_tokens": 24, "temperature": 0})
            with neighbour:
                time.sleep(2)
            before, alone = held(server.pid), neighbour.asked
            with Neighbour(port, neighbour.body) as stormed:
                storm(port, given.count, given.at_once, given.seed)
            for _ in range(100):
                time.sleep(0.1)
                load, after = http.get("/load").json(), held(server.pid)
                if not load["server_load"] + load["running"] + load["waiting"] and after["fd"] <= before["fd"]:
                    break
        print(f"{given.count} visits; load {load}; held before {before}, after {after}")
        print(f"the neighbour asked {alone} times before and {stormed.asked} times meanwhile: {stormed.answers}")
        assert load["server_load"] == load["running"] == load["waiting"] == load["kv_cache_usage"] == 0, load
        assert after["fd"] <= before["fd"]
        assert neighbour.answers == stormed.answers
        assert len(stormed.answers) == 1
    finally:
        server.terminate()
        print(f"exit code {server.wait(60)}")


if __name__ == "__main__":
    main()
