"""Random and mutated requests against `engine serve`: none may be a fault of ours, hang, or leave anything behind.

    python benchmarks/http/fuzz.py [--count 10000] [--admin 500] [--seed 1] [--at-once 8]

Starts the default model with keys, asks, then checks that nothing runs, that no page is held and that the server still
says the same as before. The document's own fuzzer: `schemathesis run URL/openapi.json -c not_a_server_error`.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import re
import subprocess
import sys
import time
from pathlib import Path

import httpx
from requests_at_random import Asked, requests_at_random

KEY = "fuzz"
PATIENCE = 60.0
"""Seconds after which an answer counts as hanging."""


class Tally:
    """What came back."""

    def __init__(self) -> None:
        self.statuses: collections.Counter[tuple[str, int]] = collections.Counter()
        self.faults: list[str] = []

    def add(self, asked: Asked, status: int | str, text: bytes) -> None:
        """Note one answer; a fault is printed with the request that made it."""
        self.statuses[asked.path, status if isinstance(status, int) else 0] += 1
        broken = b'"type":"server_error"' in text or b'"type":"api_error"' in text
        if isinstance(status, str) or status >= 500 or broken:
            self.faults.append(
                f"{status} {asked.method} {asked.path} {asked.body[:600]!r} {asked.headers} -> {text[-300:]!r}"
            )
            print(self.faults[-1], flush=True)


async def one(http: httpx.AsyncClient, asked: Asked, tally: Tally) -> None:
    """Ask, and read the answer to its end."""
    headers = {name: value.encode() for name, value in asked.headers.items()}
    request = http.build_request(asked.method, asked.path, content=asked.body or None, headers=headers)
    try:
        async with asyncio.timeout(PATIENCE):
            answer = await http.send(request)
        tally.add(asked, answer.status_code, answer.content)
    except (TimeoutError, httpx.HTTPError) as error:
        tally.add(asked, type(error).__name__, str(error).encode())


async def fuzz(url: str, given: argparse.Namespace) -> Tally:
    """All requests, the administrators' one by one behind the others."""
    tally = Tally()
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=PATIENCE, trust_env=False) as http:
        expected = await said(http)
        stream, began = requests_at_random(given.seed, given.count), time.monotonic()

        async def work() -> None:
            for asked in stream:
                await one(http, asked, tally)

        await asyncio.gather(*(work() for _ in range(given.at_once)))
        for asked in requests_at_random(given.seed, given.admin, admin=True):
            await one(http, asked, tally)
            await http.post("/engine/drain", json={"drain": False})
        print(f"{given.count + given.admin} requests in {time.monotonic() - began:.0f} s")
        await settled(http)
        assert await said(http) == expected, "the server says something else than before"
    return tally


async def said(http: httpx.AsyncClient) -> str:
    """A greedy answer."""
    body = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    answer = await http.post("/v1/completions", json=body)
    return str(answer.raise_for_status().json()["choices"][0]["text"])


async def settled(http: httpx.AsyncClient) -> None:
    """Wait until nothing runs; then no page may be held."""
    for _ in range(200):
        load = (await http.get("/load")).json()
        if not load["running"] + load["waiting"] + load["server_load"]:
            break
        await asyncio.sleep(0.1)
    assert load["running"] == load["waiting"] == load["server_load"] == 0, load
    assert load["kv_cache_usage"] == 0, load
    metrics = (await http.get("/metrics")).text
    for line in re.findall(r"^engine_(?:http_responses|request_success)_total\S* \S+$", metrics, re.MULTILINE):
        print(line)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--count", type=int, default=10000)
    arguments.add_argument("--admin", type=int, default=500)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--at-once", type=int, default=8)
    given = arguments.parse_args()
    keys = f'[{{"key": "{KEY}", "scopes": ["infer", "metrics", "admin"]}}]'
    command = [
        str(Path(sys.executable).with_name("engine")),
        "serve",
        "--port",
        "0",
        "--set",
        f"server.api_keys={keys}",
    ]
    server = subprocess.Popen(
        [*command, "--set", "logging.level=warning", "--set", "model.max_context=256"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        while httpx.get(f"{url}/health/ready").status_code != 200:
            time.sleep(0.1)
        tally = asyncio.run(fuzz(url, given))
    finally:
        server.terminate()
        code = server.wait(60)
    by_status: collections.Counter[int] = collections.Counter()
    for (_, status), number in tally.statuses.items():
        by_status[status] += number
    print(f"by status: {dict(sorted(by_status.items()))}; faults: {len(tally.faults)}; exit code {code}")
    sys.exit(1 if tally.faults or code else 0)


if __name__ == "__main__":
    main()
