"""What a client of `engine serve` waits for: the first token after a start, and after a prompt whose prefix is cached.

    python benchmarks/cpu/serving.py [--rounds 5] [--json FILE]

For each KV cache a server is started (file caches warm), then asked pairs of prompts of 1,500 tokens: a new one, and
one that shares its first 1,400 tokens. Prints the times, their ratio and what `usage` says of the reuse.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import rich
from rich.table import Table

PROMPT, SHARED = 1500, 1400


class Server:
    """`engine serve` on a free port."""

    def __init__(self, cache: str) -> None:
        self._began = time.perf_counter()
        command = [Path(sys.executable).with_name("engine"), "serve", "--port", "0", "--set", f"kv_cache.use={cache}"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self._url = self._process.stdout.readline().split()[-1]
        self._http = httpx.Client(base_url=self._url, timeout=120)

    def first_token_after_start(self) -> float:
        """Seconds from the command to the first token, asking until the server takes the request."""
        while True:
            try:
                self.ask([1, 2, 3])
                return time.perf_counter() - self._began
            except httpx.HTTPStatusError:
                time.sleep(0.02)

    def ask(self, prompt: list[int]) -> tuple[float, int]:
        """Seconds to the first token, and how many prompt tokens were cached."""
        body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
        body["stream_options"] = {"include_usage": True}
        began, first, cached = time.perf_counter(), 0.0, 0
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            response.raise_for_status()
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                first = first or time.perf_counter() - began
                usage = json.loads(line[6:]).get("usage")
                cached = usage["prompt_tokens_details"]["cached_tokens"] if usage else cached
        return first, cached

    def close(self) -> None:
        self._http.close()
        self._process.terminate()
        self._process.wait(30)


def measure(cache: str, rounds: int) -> dict[str, Any]:
    rng = random.Random(7)
    server = Server(cache)
    try:
        start = server.first_token_after_start()
        pairs = []
        for _ in range(rounds):
            shared = [rng.randrange(1000, 40000) for _ in range(SHARED)]
            ends = [[rng.randrange(1000, 40000) for _ in range(PROMPT - SHARED)] for _ in range(2)]
            cold, warm = (server.ask(shared + end) for end in ends)
            pairs.append({"cold": cold[0], "warm": warm[0], "cached": warm[1]})
        return {"cache": cache, "start": start, "pairs": pairs}
    finally:
        server.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    measure("radix", 1)  # warms the file caches
    results = [measure(cache, given.rounds) for cache in ("paged", "radix")]
    table = Table(title=f"{PROMPT:,} tokens, {SHARED:,} shared with the prompt before; medians of {given.rounds}")
    for column in ("cache", "start, s", "TTFT cold, ms", "warm, ms", "ratio", "cached"):
        table.add_column(column, justify="right")
    for r in results:
        cold, warm = (1000 * statistics.median(p[side] for p in r["pairs"]) for side in ("cold", "warm"))
        ratio = statistics.median(p["cold"] / p["warm"] for p in r["pairs"])
        cached = str(r["pairs"][0]["cached"])
        table.add_row(r["cache"], f"{r['start']:.2f}", f"{cold:.0f}", f"{warm:.0f}", f"{ratio:.1f}", cached)
    rich.print(table)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
