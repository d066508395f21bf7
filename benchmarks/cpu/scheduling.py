"""What a long prompt does to streams that run already, with and without a latency target.

    python benchmarks/cpu/scheduling.py [--streams 50] [--prompt 4000] [--targets 0,400,200] [--json FILE]

The packaged model, bf16, in this process. So many streams decode; then a prompt comes, and steps are timed until its
first token: each step is a gap between two tokens of every stream. A target of 0 is none. Prints the gaps, the time to
the prompt's first token and how many steps it took.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import rich
from rich.table import Table

from engine import LLM, SamplingParams
from engine.messages import Add


def measure(streams: int, length: int, target: float) -> dict[str, Any]:
    """Seconds of every step from the arrival of the prompt to its first token."""
    chosen = [f"scheduler.latency_target_ms={target}"] if target else []
    with LLM(overrides=[f"scheduler.max_running={streams + 1}", "kv_cache.pages=2000", *chosen]) as llm:
        engine, rng = llm.engine, random.Random(5)

        def ask(name: str, count: int, out: int) -> None:
            prompt = [rng.randrange(1000, 40000) for _ in range(count)]
            engine.add(Add(name, prompt, SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)))

        for i in range(streams):
            ask(f"stream {i}", 64, 400)
        for _ in range(12):
            engine.step()
        calm = [_step(engine, "")[0] for _ in range(8)]
        for name in ("warm-up", "prompt"):  # the first teaches what a step costs
            ask(name, length, 1)
            gaps, done = [], False
            while not done:
                took, done = _step(engine, name)
                gaps.append(took)
        assert len(engine.scheduler.running) == streams, "a stream ended before the prompt was computed"
        engine.abort(list(engine.scheduler.requests))
        while engine.has_work:
            engine.step()
        return {"target": target / 1e3, "calm": statistics.median(calm), "gaps": gaps}


def _step(engine: Any, name: str) -> tuple[float, bool]:
    began = time.perf_counter()
    outputs = engine.step()
    return time.perf_counter() - began, any(output.request_id == name for output in outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--targets", default="0,400,200", help="milliseconds")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows = [measure(given.streams, given.prompt, float(target)) for target in given.targets.split(",")]
    table = Table(title=f"{given.streams} streams, a prompt of {given.prompt:,} tokens; ms")
    for column in ("target", "gap before", "gap, median", "worst", "steps", "first token of the prompt"):
        table.add_column(column, justify="right")
    for row in rows:
        gaps = row["gaps"]
        figures = (row["calm"], statistics.median(gaps), max(gaps))
        shown = [f"{1e3 * figure:.0f}" for figure in figures]
        table.add_row(
            f"{1e3 * row['target']:.0f}" if row["target"] else "–", *shown, str(len(gaps)), f"{1e3 * sum(gaps):.0f}"
        )
    rich.print(table)
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
