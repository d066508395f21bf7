"""Law 1 on the GPU: greedy float32 tokens of a real model against `transformers`, whatever computes them.

    python benchmarks/gpu/parity.py --set model.source=path:MODEL [--batches 1,8,64]

{reference, triton} x {graphs off, on} x batches; the first batch of each engine runs while its graphs are captured.
In bfloat16, where rounding decides near ties, the share of equal tokens up to the first difference is told.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from engine import LLM, SamplingParams

DATA = Path(__file__).parents[2] / "tests" / "data"


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--batches", default="1,8,64")
    arguments.add_argument("--dtypes", default="float32,bfloat16")
    arguments.add_argument("--attentions", default="triton,reference")
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    given = arguments.parse_args()
    cases = [
        (case["prompt_token_ids"], case["fp32_token_ids"])
        for name in ("parity.json", "parity_long.json")
        for case in json.loads((DATA / name).read_text())
    ]
    wrong = 0
    for dtype in given.dtypes.split(","):
        for attention, graphs in (("triton", "true"), ("triton", "false"), ("reference", "false")):
            if attention not in given.attentions.split(","):
                continue
            settings = [f"attention={attention}", f"device.cuda_graphs={graphs}", f"model.dtype={dtype}"]
            with LLM(overrides=["device.kind=cuda", *settings, *given.overrides]) as llm:
                for batch in map(int, given.batches.split(",")):
                    differ = compare(llm, cases, batch, " ".join(settings))
                    wrong += differ if dtype == "float32" else 0
    return 1 if wrong else 0


def compare(llm: LLM, cases: list[tuple[list[int], list[int]]], batch: int, name: str) -> int:
    """Requests whose tokens differ from those of transformers in float32."""
    began, equal, total, differ = time.monotonic(), 0, 0, 0
    wanted = list(islice(cycle(cases), max(batch, len(cases))))
    for at in range(0, len(wanted), batch):
        chunk = wanted[at : at + batch]
        most = max(len(tokens) for _, tokens in chunk)
        params = SamplingParams(temperature=0.0, max_tokens=most, ignore_eos=True)
        done = llm.generate([prompt for prompt, _ in chunk], params)
        for completion, (_, tokens) in zip(done, chunk, strict=True):
            got = completion.token_ids[: len(tokens)]
            agreed = next((i for i, (a, b) in enumerate(zip(got, tokens, strict=True)) if a != b), len(tokens))
            equal, total, differ = equal + agreed, total + len(tokens), differ + (agreed < len(tokens))
    took = time.monotonic() - began
    print(f"{name} batch {batch}: {differ} of {len(wanted)} differ, {equal}/{total} tokens, {took:.1f} s", flush=True)
    return differ


if __name__ == "__main__":
    sys.exit(main())
