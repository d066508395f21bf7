"""What a user sees of the engine at rest: allocations and idle time of decode steps, and how cost grows.

    python benchmarks/gpu/steady.py FOLDER [--json growth.json] [--contexts 1000,…] [--set KEY=VALUE …]

FOLDER comes from `shape.py`. One engine in this process; 1,000 steps at batch 1 and 64 with the counters of the caching
allocator before and after, the device's idle share between the kernels of some of these steps, then the rows that
`benchmarks/plot.py` draws.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from growth import PROMPT, decode
from limits import versions

from engine import LLM, SamplingParams
from engine.messages import Add

COUNTERS = ("allocation.all.allocated", "segment.all.allocated")


def fill(llm: LLM, batch: int, steps: int, draw: random.Random) -> None:
    """Put so many requests into the engine, and step until all of them decode."""
    engine, params = llm.engine, SamplingParams(temperature=0.0, max_tokens=steps + 64, ignore_eos=True)
    for number in range(batch):
        engine.add(Add(f"s{number}", [draw.randrange(1000, 40000) for _ in range(PROMPT)], params))
    while engine.scheduler.waiting or any(r.remaining > 1 for r in engine.scheduler.running.values()):
        engine.step()
    for _ in range(10):
        engine.step()


def empty(llm: LLM) -> None:
    llm.engine.abort(list(llm.engine.scheduler.requests))
    while llm.engine.has_work:
        llm.engine.step()


def steady(llm: LLM, batch: int, steps: int, draw: random.Random) -> None:
    """Allocations of so many steps, then the idle share of 30 more."""
    fill(llm, batch, steps, draw)
    before, began = torch.cuda.memory_stats(), time.perf_counter()
    for _ in range(steps):
        llm.engine.step()
    took, after = time.perf_counter() - began, torch.cuda.memory_stats()
    asked = {name: after[name] - before[name] for name in COUNTERS}
    print(f"{steps} steps of {batch}: {took / steps * 1e3:.2f} ms a step, asked for memory {asked}", flush=True)
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(30):
            llm.engine.step()
        torch.cuda.synchronize()
    spans = sorted((e.time_range.start, e.time_range.end) for e in seen.events() if "CUDA" in str(e.device_type))
    spans = spans[len(spans) // 3 :]
    busy, idle, reach = 0.0, 0.0, spans[0][0]
    for start, end in spans:
        idle += max(0.0, start - reach)
        busy += max(0.0, end - max(start, reach))
        reach = max(reach, end)
    print(f"idle share at {batch}: {idle / (busy + idle):.4f} of {(busy + idle) / 1e3:.1f} ms", flush=True)
    empty(llm)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--requests", default="1,4,16,64,256")
    arguments.add_argument("--contexts", default="1000,4000,16000,64000,128000")
    arguments.add_argument("--steps", type=int, default=1000)
    arguments.add_argument("--json", type=Path)
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    given = arguments.parse_args()
    sizes = {"scheduler.max_running": 256, "scheduler.token_budget": 8192, "kv_cache.memory": "40GiB"}
    settings = {"model.source": f"path:{given.folder}", "model.loader": "dummy", **sizes}
    draw, found = random.Random(3), {"requests": [], "contexts": []}  # type: ignore[var-annotated]
    with LLM(overrides=[*(f"{key}={value}" for key, value in settings.items()), *given.overrides]) as llm:
        runner: Any = llm.engine.executor._runner  # type: ignore[attr-defined]
        while any(made is not None and made.next for made in (runner._decodes, runner._spread, runner._shared)):
            time.sleep(0.2)  # the executor's thread captures
        for batch in (1, 64):
            steady(llm, batch, given.steps, draw)
        rows = [("requests", int(n), PROMPT) for n in given.requests.split(",")]
        rows += [("contexts", 1, int(n)) for n in given.contexts.split(",") if n]
        for key, requests, length in rows:
            found[key].append(decode(llm, requests, length, 32, draw))
            print(found[key][-1], flush=True)
            if given.json:  # after each: whoever runs short of time has what there is
                given.json.write_text(json.dumps({"title": f"Qwen2.5-7B shape on {versions()}", **found}, indent=1))


if __name__ == "__main__":
    main()
