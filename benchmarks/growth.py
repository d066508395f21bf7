"""How cost grows: throughput and step time with the number of requests, and with the length of their context.

    python benchmarks/growth.py --json FILE [--requests 1,4,16,64,256] [--contexts 1000,…] [--steps 32] [--set K=V …]

For each number of requests, prompts of 128 tokens are decoded together; for each context, one request with a prompt of
that length. The engine runs in this process; the model is the packaged one unless `--set model.source=…` says another.
Steps are timed from the second decode on; throughput is requests over the mean step. `benchmarks/plot.py` draws it.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine import LLM, SamplingParams
from engine.messages import Add

PROMPT = 128


def decode(llm: LLM, requests: int, length: int, steps: int, rng: random.Random) -> dict[str, Any]:
    """Seconds to the last first token, and of the steps after."""
    engine, left = llm.engine, {f"r{i}" for i in range(requests)}
    params = SamplingParams(temperature=0.0, max_tokens=steps + 4, ignore_eos=True)
    for name in left:
        engine.add(Add(name, [rng.randrange(1000, 40000) for _ in range(length)], params))
    engine.scheduler.cache.reset()
    began = time.perf_counter()
    while left:
        left -= {output.request_id for output in engine.step()}
    prefill = time.perf_counter() - began
    engine.step()
    taken = []
    while len(engine.scheduler.running) == requests and len(taken) < steps:
        began = time.perf_counter()
        engine.step()
        taken.append(time.perf_counter() - began)
    engine.abort(list(engine.scheduler.requests))
    while engine.has_work:
        engine.step()
    assert taken, "requests ended before all decoded; give more --steps"
    mean = statistics.fmean(taken)
    row = {"requests": requests, "context": length, "prefill_seconds": prefill, "step_seconds": mean}
    return {
        **row,
        "step_p99_seconds": sorted(taken)[int(0.99 * (len(taken) - 1))],
        "tokens_per_second": requests / mean,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", default="1,4,16,64,256")
    parser.add_argument("--contexts", default="1000,2000,4000,8000", help="prompts; the model must take them")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--set", action="append", default=[], dest="overrides")
    parser.add_argument("--json", type=Path, required=True)
    given = parser.parse_args()
    counts, lengths = (_numbers(text) for text in (given.requests, given.contexts))
    longest = max([PROMPT, *lengths]) + given.steps + 16
    pages = -(-max(max(counts, default=1) * (PROMPT + given.steps + 16), longest) // 16)
    sizes = [f"scheduler.max_running={max([1, *counts])}", f"kv_cache.pages={pages}"]
    rng, found = random.Random(3), {"requests": [], "contexts": []}  # type: ignore[var-annotated]
    with LLM(overrides=[*sizes, *given.overrides]) as llm:
        decode(llm, 1, PROMPT, 8, rng)  # warm-up
        for key, rows in (("requests", [(n, PROMPT) for n in counts]), ("contexts", [(1, n) for n in lengths])):
            for requests, length in rows:
                found[key].append(decode(llm, requests, length, given.steps, rng))
                print(found[key][-1], flush=True)
        device = llm.composition.device.name
    found = {"title": f"{given.overrides or 'SmolLM2-135M'} on {device}", **found}
    given.json.write_text(json.dumps(found, indent=1) + "\n")


def _numbers(text: str) -> Sequence[int]:
    return [int(part) for part in text.split(",") if part]


if __name__ == "__main__":
    main()
