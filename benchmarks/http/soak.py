"""Full load with random aborts for as long as you like: memory must stay flat, and the metrics tell what clients saw.

    python benchmarks/http/soak.py [--minutes 20] [--clients 32] [--seed 1]

Starts the default model. Clients stream completions of random prompts, some with a shared beginning, and a third of
them hangs up in the middle. Prints once a minute what both processes hold in memory (RSS, MB), and in the end the slope
after the warm-up (a fifth of the time), and the server's counts beside the clients'.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ["Write a story about ", "Explain in detail ", "List twenty facts about ", "Translate into French: "]
THINGS = [
    "rivers",
    "bread",
    "iron",
    "Rome",
    "chess",
    "bees",
    "sleep",
    "maps",
    "glass",
    "salt",
    "winter",
    "trains",
    "ink",
]


@dataclass(slots=True)
class Counts:
    """What the clients saw."""

    whole: int = 0  # streams read to their end
    cut: int = 0  # hung up in the middle
    choices: int = 0  # of all
    prompt_tokens: int = 0  # of all, once for each choice, as the server's metrics count
    whole_tokens: int = 0  # generated in streams that were read to their end
    cut_tokens: int = 0  # in the others, until their client left
    failures: list[str] = field(default_factory=list)


def body(chance: random.Random) -> dict[str, Any]:
    """A request of its own kind each time."""
    shared = "You are a helpful assistant. " * chance.choice((0, 5, 40))
    prompt = shared + chance.choice(PROMPTS) + " and ".join(chance.choices(THINGS, k=chance.randint(1, 60)))
    made = {
        "prompt": prompt,
        "max_tokens": chance.choice((4, 16, 64, 200)),
        "stream": True,
        "n": chance.choice((1, 1, 2)),
    }
    more = [
        {},
        {"temperature": 0},
        {"stop": ["the", "."]},
        {"logprobs": 2},
        {"structured_outputs": {"regex": "[a-z ]{8,40}"}},
    ]
    return {**made, "stream_options": {"include_usage": True, "continuous_usage_stats": True}, **chance.choice(more)}


async def client(http: httpx.AsyncClient, chance: random.Random, end: float, counts: Counts) -> None:
    """Asks until the time is over."""
    while time.monotonic() < end:
        asked = body(chance)
        patience = chance.choice((1, 5, 20)) if chance.random() < 1 / 3 else None
        async with http.stream("POST", "/v1/completions", json=asked) as answer:
            if answer.status_code != 200:
                counts.failures.append(f"{answer.status_code} {(await answer.aread())[:300]!r}")
                continue
            usage, whole = await read(answer, patience, counts)
        counts.choices += asked["n"]
        counts.prompt_tokens += asked["n"] * usage["prompt_tokens"]
        if whole:
            counts.whole += 1
            counts.whole_tokens += usage["completion_tokens"]
        else:
            counts.cut += 1
            counts.cut_tokens += usage["completion_tokens"]


async def read(answer: httpx.Response, patience: int | None, counts: Counts) -> tuple[dict[str, Any], bool]:
    """The last usage that was told, and whether the stream was read to its end. Leaves after `patience` events."""
    usage, lines = {"prompt_tokens": 0, "completion_tokens": 0}, 0
    async for line in answer.aiter_lines():
        if line == "data: [DONE]":
            return usage, True
        if line.startswith("data: "):
            chunk, lines = json.loads(line[6:]), lines + 1
            if "error" in chunk:
                counts.failures.append(line[:300])
            usage = chunk.get("usage") or usage
        if patience is not None and lines >= patience:
            return usage, False
    counts.failures.append("a stream ended without [DONE]")
    return usage, False


def rss(pid: int) -> float:
    """Resident memory of a process, MB."""
    found = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def slope(minutes: list[float], values: list[float]) -> float:
    """Of the straight line with the least squares, per minute."""
    mean = sum(minutes) / len(minutes)
    spread = sum((m - mean) ** 2 for m in minutes)
    return sum((m - mean) * v for m, v in zip(minutes, values, strict=True)) / spread if spread else 0.0


async def watch(pids: dict[str, int], began: float, end: float) -> None:
    """Print memory once a minute, and how it grew in the end."""
    times: list[float] = []
    sizes: dict[str, list[float]] = {name: [] for name in pids}
    while (now := time.monotonic()) < end:
        times.append((now - began) / 60)
        for name, pid in pids.items():
            sizes[name].append(rss(pid))
        if len(times) % 12 == 1:
            print(
                f"{times[-1]:5.1f} min", *(f"{name} {values[-1]:8.1f} MB" for name, values in sizes.items()), flush=True
            )
        await asyncio.sleep(5)
    start = next(i for i, t in enumerate(times) if t >= times[-1] / 5)
    for name, values in sizes.items():
        print(f"slope of {name} after {times[start]:.1f} min: {slope(times[start:], values[start:]):+.3f} MB a minute")


def counter(text: str, name: str, label: str = "") -> float:
    """Sum of a counter's samples whose labels contain `label`."""
    found = re.findall(rf"^engine_{name}{{([^}}]*)}} (\S+)$", text, re.MULTILINE)
    return sum(float(value) for labels, value in found if label in labels)


async def account(http: httpx.AsyncClient, counts: Counts, before: str) -> None:
    """Compare both sides. Only what was generated for a client after it left is known to the server alone."""
    asked = 1  # the scrape before
    for _ in range(100):
        load, asked = (await http.get("/load")).json(), asked + 1
        if not load["server_load"] + load["running"] + load["waiting"]:
            break
        await asyncio.sleep(0.1)
    after = (await http.get("/metrics")).text

    def grown(name: str, label: str = "") -> float:
        return counter(after, name, label) - counter(before, name, label)

    answers = grown("http_responses_total", 'status="200"') - asked
    ended = sum(grown("request_success_total", f'finished_reason="{reason}"') for reason in ("stop", "length"))
    aborted = grown("request_success_total", 'finished_reason="abort"')
    made, taken = grown("generation_tokens_total"), grown("prompt_tokens_total")
    print(f"clients: {counts}")
    print(f"server: {answers:.0f} answers, {ended:.0f} choices ended, {aborted:.0f} aborted, {taken:.0f} prompt tokens")
    print(f"server: {made:.0f} tokens generated; {load}")
    assert not counts.failures
    assert counts.whole + counts.cut == answers
    assert counts.choices == ended + aborted
    assert counts.prompt_tokens == taken
    assert counts.whole_tokens + counts.cut_tokens <= made
    assert load["running"] == load["waiting"] == load["server_load"] == load["kv_cache_usage"] == 0


async def soak(url: str, pids: dict[str, int], given: argparse.Namespace) -> None:
    """Load, watch, account."""
    counts, began = Counts(), time.monotonic()
    end = began + 60 * given.minutes
    limits = httpx.Limits(max_connections=given.clients)
    async with httpx.AsyncClient(base_url=url, timeout=300, trust_env=False, limits=limits) as http:
        before = (await http.get("/metrics")).text
        clients = [client(http, random.Random(f"{given.seed}:{i}"), end, counts) for i in range(given.clients)]
        await asyncio.gather(watch(pids, began, end), *clients)
        await account(http, counts, before)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--minutes", type=float, default=20)
    arguments.add_argument("--clients", type=int, default=32)
    arguments.add_argument("--seed", type=int, default=1)
    given = arguments.parse_args()
    command = [str(Path(sys.executable).with_name("engine")), "serve", "--port", "0", "--set", "logging.level=warning"]
    command += ["--set", "kv_cache.memory=384MiB"]  # small, so that every page has been touched after the warm-up
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        url = server.stdout.readline().split()[-1]
        while httpx.get(f"{url}/health/ready").status_code != 200:
            time.sleep(0.1)
        (core,) = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
        asyncio.run(soak(url, {"http": server.pid, "core": int(core)}, given))
    finally:
        server.terminate()
        print(f"exit code {server.wait(60)}")


if __name__ == "__main__":
    main()
