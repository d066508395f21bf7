"""Every combination of law 1 on every prompt, greedy in float32 against `transformers`.

    python benchmarks/parity.py [--part I/N] [--cache radix] [--prefix hit] [--threads 2] [--set KEY=VALUE …]

{paged, radix} x {cold, prefix hit} x {chunk 64, whole} x {alone, 16 at once} x {n-gram off, on} x {preempted, not} x
{one process, prefill/decode pair}. Takes an hour on two cores; `--part 1/4` takes every fourth build, for machines that
can run several at once. Ends with a table, and with exit code 1 if any prompt's tokens differ.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import rich
from rich.table import Table

from engine.testing.parity import Case, Outcome, every_build, every_traffic, run_all

DATA = Path(__file__).parents[1] / "tests" / "data"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--part", default="1/1", help="I/N: every Nth build, beginning with the Ith")
    arguments.add_argument("--cache", choices=["paged", "radix"], help="only builds with this cache")
    arguments.add_argument("--prefix", choices=["cold", "hit"], help="only traffic over an empty or a warm cache")
    arguments.add_argument("--threads", type=int, default=2)
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    given = arguments.parse_args()
    part, parts = map(int, given.part.split("/"))
    prompts = [p for name in ("parity.json", "parity_long.json") for p in json.loads((DATA / name).read_text())]
    cases = [Case(p["id"], p["prompt_token_ids"], p["fp32_token_ids"]) for p in prompts]
    base = ["model.dtype=float32", f"device.threads={given.threads}", *given.overrides]
    began = time.monotonic()

    def told(outcome: Outcome) -> None:
        verdict = "same" if not outcome.wrong else f"DIFFERENT: {', '.join(outcome.wrong)}"
        print(f"{time.monotonic() - began:7.0f} s  {outcome.build}  {outcome.traffic}  {verdict}", flush=True)

    builds = [build for build in every_build() if given.cache in (None, build.cache)]
    traffics = [t for t in every_traffic() if given.prefix in (None, "hit" if t.warm else "cold")]
    outcomes = run_all(builds[part - 1 :: parts], traffics, cases, base, told)
    show(outcomes, len(cases))
    return 1 if any(outcome.wrong for outcome in outcomes) else 0


def show(outcomes: list[Outcome], cases: int) -> None:
    table = Table(title=f"{len(outcomes)} combinations x {cases} prompts")
    columns = (
        "cache",
        "chunk",
        "n-gram",
        "pair",
        "prefix",
        "batch",
        "preempted",
        "equal",
        "cached",
        "drafted",
        "fetched",
    )
    for column in columns:
        table.add_column(column, justify="right")
    for o in outcomes:
        table.add_row(
            o.build.cache,
            str(o.build.chunk or "–"),
            "on" if o.build.speculator == "ngram" else "off",
            "yes" if o.build.pair else "no",
            "hit" if o.traffic.warm else "cold",
            str(o.traffic.batch),
            str(o.preemptions),
            f"{cases - len(o.wrong)}/{cases}",
            str(o.cached_tokens),
            str(o.drafted),
            str(o.fetched),
        )
    rich.get_console().width = 110
    rich.print(table)


if __name__ == "__main__":
    sys.exit(main())
