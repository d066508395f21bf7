"""Chaos run: a router, prefill and decode engines on one machine, and somebody who kills them while clients ask.

python benchmarks/chaos.py --requests 500 --kills 12

Every text is compared with what one engine alone writes. An engine is killed with SIGKILL only while another one of its
role is ready, and started again. At the end no page may be held and no transfer open anywhere. Exits with 1 when a text
is wrong, a client saw a 5xx, or something leaked. The model is tiny and random; processes and signals are real.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from engine.testing.cluster import ServerProcess, tiny_engine

KEY = {"Authorization": "Bearer chaos"}
LEASE = 2.0
ENGINE = {
    "kv_connectors": [{"use": "local", "lease_seconds": LEASE, "fetch_timeout": 5}],
    "server": {"api_keys": [{"key": "chaos", "scopes": ["infer", "metrics", "admin"]}]},
}


@dataclass(frozen=True, slots=True)
class Question:
    """One prompt, asked in one of the APIs."""

    path: str
    body: dict[str, Any]


@dataclass(slots=True)
class Tally:
    """What happened."""

    ends: Counter[str] = field(default_factory=Counter)
    kills: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    prompts: dict[str, int] = field(default_factory=dict)  # by where they were computed and why
    transfers: Counter[str] = field(default_factory=Counter)  # by how they ended, as far as the engines still know

    def fault(self, text: str) -> None:
        self.ends["fault"] += 1
        self.faults.append(text)


class Engine(ServerProcess):
    """One engine of the cluster."""

    def __init__(self, role: str, config: Path) -> None:
        super().__init__("serve", config, "--role", role)
        self.role = role


async def all_ready(processes: Iterable[ServerProcess]) -> None:
    await asyncio.gather(*(asyncio.to_thread(process.wait_ready) for process in processes))


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> AsyncIterator[tuple[ServerProcess, list[Engine]]]:
    """A router and two engines of each role, ready."""
    config, router = tiny_engine(folder, **ENGINE), folder / "router.yaml"
    engines = [Engine(role, config) for role in ("prefill", "prefill", "decode", "decode")]
    pools = {role: [one.url for one in engines if one.role == role] for role in ("prefill", "decode")}
    settings = {"handover": {"mode": "always"}, "probe": {"seconds": 0.2, "key": "chaos"}, "admin_key": "chaos"}
    router.write_text(json.dumps({**pools, **settings, "logging": {"level": "error"}}))
    front = ServerProcess("route", router)
    try:
        for process in (*engines, front):
            process.start()
        await all_ready((*engines, front))
        yield front, engines
    finally:
        for process in (front, *engines):
            process.end()


def questions(rng: random.Random, count: int) -> list[Question]:
    """Prompts of many lengths, half of them with a beginning that others share, over all APIs."""
    made = []
    for _ in range(count):
        words = "".join(rng.choice("abcdefgh ") for _ in range(rng.randrange(8, 400)))
        text = ("You are a helpful assistant. " * 10 if rng.random() < 0.5 else "") + words
        made.append(rng.choice([_chat, _completion, _response, _message])(text, rng.randrange(1, 33)))
    return made


def _chat(text: str, limit: int) -> Question:
    messages = [{"role": "user", "content": text}]
    return Question("/v1/chat/completions", {"messages": messages, "max_tokens": limit, "temperature": 0})


def _completion(text: str, limit: int) -> Question:
    return Question("/v1/completions", {"prompt": text, "max_tokens": limit, "temperature": 0})


def _response(text: str, limit: int) -> Question:
    return Question("/v1/responses", {"input": text, "max_output_tokens": limit, "temperature": 0, "store": False})


def _message(text: str, limit: int) -> Question:
    messages = [{"role": "user", "content": text}]
    return Question("/v1/messages", {"messages": messages, "max_tokens": limit, "temperature": 0})


def text_of(path: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if path == "/v1/responses":
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if path == "/v1/messages":
        return "".join(block["text"] for block in answer["content"])
    choice = answer["choices"][0]
    return str(choice["text"] if path == "/v1/completions" else choice["message"]["content"])


def text_of_stream(path: str, events: list[dict[str, Any]]) -> str | None:
    """The text of a stream; None when it was broken off with an error."""
    if any("error" in event and event["error"] for event in events) or any(e.get("type") == "error" for e in events):
        return None
    if path == "/v1/responses":
        return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
    if path == "/v1/messages":
        return "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    choices = [event["choices"][0] for event in events if event.get("choices")]
    pieces = [c["text"] if path == "/v1/completions" else c["delta"].get("content") for c in choices]
    return "".join(piece or "" for piece in pieces)


async def expected(http: httpx.AsyncClient, engine: Engine, question: Question) -> str:
    """What one engine alone writes."""
    answer = await http.post(engine.url + question.path, json=question.body, headers=KEY)
    assert answer.status_code == 200, answer.text
    return text_of(question.path, answer.json())


async def ask(
    http: httpx.AsyncClient, router: ServerProcess, question: Question, right: str, how: str, tally: Tally
) -> None:
    """One client: reads the whole answer, or a stream, or hangs up in the middle of one."""
    try:
        if how == "whole":
            answer = await http.post(router.url + question.path, json=question.body, headers=KEY)
            status, got = answer.status_code, text_of(question.path, answer.json()) if answer.is_success else None
        else:
            status, got = await _stream(http, router, question, hang_up=how == "hang up")
    except httpx.HTTPError as error:
        tally.fault(f"{question.path} ({how}): {type(error).__name__}: {error}")
        return
    if status != 200:
        tally.fault(f"{question.path} ({how}) was answered {status}")
    elif how == "hang up":
        tally.ends["hung up"] += 1
    elif got is None:
        tally.ends["stream broken off by the death of its decode engine"] += 1
    elif got != right:
        tally.fault(f"{question.path} ({how}): {got!r} instead of {right!r}")
    else:
        tally.ends[f"right ({how})"] += 1


async def _stream(
    http: httpx.AsyncClient, router: ServerProcess, question: Question, *, hang_up: bool
) -> tuple[int, str | None]:
    events = []
    async with http.stream(
        "POST", router.url + question.path, json={**question.body, "stream": True}, headers=KEY
    ) as answer:
        if answer.status_code != 200:
            return answer.status_code, None
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
            if hang_up and len(events) > 3:
                return 200, None
    return 200, text_of_stream(question.path, events)


async def kill(
    engines: list[Engine], order: Sequence[int], times: int, pause: float, rng: random.Random, tally: Tally
) -> None:
    """Kill engines in turn, each only while another one of its role is ready, and start them again."""
    for number in range(times):
        await asyncio.sleep(pause * rng.uniform(0.5, 1.5))
        victim = engines[order[number % len(order)]]
        (other,) = [one for one in engines if one.role == victim.role and one is not victim]
        await all_ready((victim, other))
        victim.end()
        tally.kills[victim.role] += 1
        await asyncio.sleep(rng.random() * pause)
        victim.start()


async def leaks(http: httpx.AsyncClient, engine: Engine) -> str | None:
    """What an engine holds though nobody asks it for anything; leases may take their time to expire."""
    end = time.monotonic() + LEASE + 15
    while True:
        leases = (await http.get(f"{engine.url}/engine/leases", headers=KEY)).json()["leases"]
        load = (await http.get(f"{engine.url}/load", headers=KEY)).json()
        held = {"leases": leases, "usage": load["kv_cache_usage"], "running": load["running"], "open": load["waiting"]}
        if not any(held.values()):
            return None
        if time.monotonic() > end:
            return f"the {engine.role} engine still holds {held}"
        await asyncio.sleep(0.1)


async def transfers(http: httpx.AsyncClient, engine: Engine) -> Counter[str]:
    """How an engine's transfers ended in this life of its."""
    text = (await http.get(f"{engine.url}/metrics", headers=KEY)).text
    found = re.findall(r'^engine_kv_transfers_ended_total\{.*state="(\w+)"\} ([0-9.]+)', text, re.MULTILINE)
    return Counter({state: int(float(count)) for state, count in found})


async def run(options: argparse.Namespace, folder: Path) -> Tally:
    """The whole run."""
    rng, tally = random.Random(options.seed), Tally()
    async with (
        httpx.AsyncClient(timeout=120, trust_env=False, limits=httpx.Limits(max_connections=None)) as http,
        cluster(folder) as (router, engines),
    ):
        asked = questions(rng, min(options.requests, 64))
        right = [await expected(http, engines[-1], question) for question in asked]
        await http.post(f"{engines[-1].url}/engine/flush", headers=KEY)
        gate = asyncio.Semaphore(options.concurrency)
        killing = asyncio.create_task(
            kill(engines, [*map(int, options.order)], options.kills, options.pause, rng, tally)
        )
        started = 0

        async def client(number: int, how: str) -> None:
            async with gate:
                await ask(http, router, asked[number % len(asked)], right[number % len(asked)], how, tally)

        clients = set[asyncio.Task[None]]()
        while started < options.requests or not killing.done():
            await gate.acquire()
            gate.release()
            clients.add(asyncio.create_task(client(started, rng.choice(["whole", "stream", "stream", "hang up"]))))
            started += 1
            await asyncio.sleep(options.gap)
        await asyncio.gather(killing, *clients)
        await all_ready(engines)
        tally.faults += [leak for engine in engines if (leak := await leaks(http, engine)) is not None]
        tally.prompts = (await http.get(f"{router.url}/engine/transfer", headers=KEY)).json()["decided"]
        for engine in engines:
            tally.transfers += await transfers(http, engine)
        for process in (router, *engines):
            if (code := await asyncio.to_thread(process.end, signal.SIGTERM)) != 0:
                tally.fault(f"{process.url} ended with {code}")
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--requests", type=int, default=500, help="at least so many; it goes on until all kills are done"
    )
    parser.add_argument("--kills", type=int, default=12, help="engines killed, in turn")
    parser.add_argument("--order", default="0213", help="which engines in turn: 0 and 1 prefill, 2 and 3 decode")
    parser.add_argument("--pause", type=float, default=2.0, help="seconds between kills, on average")
    parser.add_argument("--gap", type=float, default=0.02, help="seconds between requests")
    parser.add_argument("--concurrency", type=int, default=16, help="clients at once")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tally = asyncio.run(run(options, Path(folder)))
    for name, count in sorted(tally.ends.items()):
        print(f"{count:6d}  {name}")
    print(f"kills: {dict(tally.kills)}; prompts: {tally.prompts}; transfers: {dict(tally.transfers)}")
    print(*tally.faults[:20], sep="\n")
    print("no page held and no transfer open at the end" if not tally.faults else f"{len(tally.faults)} faults")
    sys.exit(1 if tally.faults or not tally.ends else 0)


if __name__ == "__main__":
    main()
