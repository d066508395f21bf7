"""What KV caches cost the scheduler: pages and prefixes alone, without a model.

    python benchmarks/cpu/cache.py [--rounds 5] [--scale 1.0] [--json FILE]

Streams come and go as in an engine that is always full: each step computes a chunk of a prompt or a token for every
stream, and calls the cache as the scheduler does. In turn, for each round: `paged` with prefix caching off (the least
that bookkeeping can cost), `paged`, `radix`. Workloads:

    shared nothing   every prompt is new
    shared prefix    eight prefixes of half a prompt's length, one for each request
    scans and hot    eight hot prompts among fifteen times as many new ones
    turns            conversations that come back with all they said and a little more

Prints microseconds of CPU time a step (mean, median, p99 and worst), tokens found, and what the mean would add to a
step of 5 ms, which is what a 7B model on an H200 takes for 64 streams, as a share of it.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from engine.plugins.kv_caches import paged, radix
from engine.specs.kv_cache import KVCache

PAGE, STREAMS, CHUNK, OUTPUT, PROMPT, POOL = 16, 64, 512, 64, 1600, 12_000
STEP = 5e-3

CACHES: dict[str, Callable[[], KVCache]] = {
    "paged, no reuse": lambda: paged.build(
        paged.PagedOptions(prefix_caching=False), num_pages=POOL, page_size=PAGE
    ),
    "paged": lambda: paged.build(paged.PagedOptions(), num_pages=POOL, page_size=PAGE),
    "radix": lambda: radix.build(radix.RadixOptions(), num_pages=POOL, page_size=PAGE),
}  # fmt: skip


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.getrandbits(17) for _ in range(count)]


def nothing(rng: random.Random) -> Iterator[list[int]]:
    while True:
        yield _tokens(rng, PROMPT)


def prefix(rng: random.Random) -> Iterator[list[int]]:
    heads = [_tokens(rng, PROMPT // 2) for _ in range(8)]
    while True:
        yield rng.choice(heads) + _tokens(rng, PROMPT // 2)


def scans(rng: random.Random) -> Iterator[list[int]]:
    hot = [_tokens(rng, PROMPT - 100) for _ in range(8)]
    while True:
        for head in hot:
            yield head + _tokens(rng, 100)
            for _ in range(15):
                yield _tokens(rng, PROMPT)


def turns(rng: random.Random) -> Iterator[list[int]]:
    talks = [_tokens(rng, PROMPT // 2) for _ in range(STREAMS)]
    while True:
        for n, talk in enumerate(talks):
            yield list(talk)
            talks[n] = talk + _tokens(rng, 200) if len(talk) < 2 * PROMPT else _tokens(rng, PROMPT // 2)


WORKLOADS = {"shared nothing": nothing, "shared prefix": prefix, "scans and hot": scans, "turns": turns}


@dataclass(slots=True)
class Stream:
    name: str
    tokens: list[int]
    computed: int
    end: int


def drive(cache: KVCache, prompts: Iterator[list[int]], steps: int) -> dict[str, Any]:
    """Seconds of CPU that the cache took in each step, and what it found."""
    streams: list[Stream] = []
    taken, count = [], 0
    for _ in range(steps):
        waiting = [next(prompts) for _ in range(STREAMS - len(streams))][:4]
        began = time.thread_time()
        for prompt in waiting:
            count += 1
            name = f"r{count}"
            found = cache.open(name, prompt)
            if not cache.allocate(name, len(prompt)):
                cache.close(name)
                break
            streams.append(Stream(name, prompt, found.num_tokens, len(prompt) + OUTPUT))
        budget, ended = CHUNK, []
        for stream in streams:
            left = len(stream.tokens) - stream.computed
            if left > 1:
                take = min(left, budget)
                budget -= take
            else:
                take = 1
                cache.allocate(stream.name, len(stream.tokens))
            stream.computed += take
            cache.commit(stream.name, stream.tokens, stream.computed)
            if stream.computed == len(stream.tokens):
                stream.tokens.append(count)
            if len(stream.tokens) > stream.end:
                ended.append(stream)
        for stream in ended:
            cache.close(stream.name)
        taken.append(time.thread_time() - began)
        streams = [stream for stream in streams if stream not in ended]
    stats = cache.stats()
    return {
        "requests": count,
        "taken": taken[steps // 5 :],  # without the time in which the pool fills up
        "found": stats.hit_tokens / max(1, stats.lookup_tokens),
        "evicted": stats.evicted_pages,
        "details": dict(stats.details),
    }


def summary(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Of the rounds, the median of each figure; the worst step is the best of the rounds' worst, as others share the
    machine."""

    def over(figure: Callable[[list[float]], float]) -> list[float]:
        return [figure(run["taken"]) for run in runs]

    return {
        "mean": statistics.median(over(statistics.fmean)),
        "p50": statistics.median(over(statistics.median)),
        "p99": statistics.median(over(lambda taken: statistics.quantiles(taken, n=100)[98])),
        "worst": min(over(max)),
        "requests": runs[-1]["requests"],
        "found": runs[-1]["found"],
        "evicted": runs[-1]["evicted"],
        "details": runs[-1]["details"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the 6,000 steps of a run")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    for title, workload in WORKLOADS.items():
        runs: dict[str, list[dict[str, Any]]] = {name: [] for name in CACHES}
        for turn in range(given.rounds):
            for name, make in CACHES.items():
                gc.collect()
                runs[name].append(drive(make(), workload(random.Random(turn)), int(6000 * given.scale)))
        results[title] = {name: summary(each) for name, each in runs.items()}
        rich.print(table(title, results[title]))
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


def table(title: str, rows: dict[str, Any]) -> Table:
    shown = Table(title=title)
    for column in ("cache", "mean, µs", "p50", "p99", "worst", "of 5 ms, against no reuse", "found", "evicted"):
        shown.add_column(column, justify="right")
    base = rows["paged, no reuse"]["mean"]
    for name, row in rows.items():
        micros = (f"{1e6 * row[key]:.0f}" for key in ("mean", "p50", "p99", "worst"))
        more = f"{(row['mean'] - base) / STEP:+.2%}"
        shown.add_row(name, *micros, more, f"{row['found']:.1%}", f"{row['evicted']:,}")
    return shown


if __name__ == "__main__":
    main()
