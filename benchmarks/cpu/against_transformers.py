"""engine against transformers on this machine's CPU, same weights, in turn: A, B, A, B.

    python benchmarks/cpu/against_transformers.py [--rounds 3] [--json FILE]

Each side lives in a process of its own and is idle while the other is measured. Prints one table: the median of each
side and of the rounds' ratios. Rates drift by the minute on shared machines, ratios within a round do not.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import rich
from rich.progress import Progress
from rich.table import Table

THREADS = 2
MEASURES = {
    "one stream, decode": "tok/s",
    "64 at once, prompt 128, out 64": "tok/s",
    "prefill 2,048": "tok/s",
}


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that share no prefix."""
    rng = random.Random(seed)
    return [[rng.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]


def rates(generate: Callable[[list[list[int]], int], float], seed: int) -> dict[str, float]:
    """Measure one side. `generate(prompts, new tokens)` returns seconds; every prompt gets exactly that many."""
    (prompt,) = random_prompts(1, 128, seed)
    whole, first = generate([prompt], 97), generate([prompt[::-1]], 1)
    batch = generate(random_prompts(64, 128, seed + 1), 64)
    long = generate(random_prompts(1, 2048, seed + 2), 1)
    return {
        "one stream, decode": 96 / (whole - first),
        "64 at once, prompt 128, out 64": 64 * 64 / batch,
        "prefill 2,048": 2048 / long,
    }


def serve(
    pipe: Connection,
    make: Callable[[], Callable[[list[list[int]], int], float]],
    measure: Callable[[Callable[[list[list[int]], int], float], int], dict[str, float]] = rates,
) -> None:
    """A side's process: measures once for every seed that it is sent."""
    generate = make()
    generate(random_prompts(2, 64, 1), 4)  # warm
    pipe.send("ready")
    while (seed := pipe.recv()) is not None:
        pipe.send(measure(generate, seed))


def engine_side() -> Callable[[list[list[int]], int], float]:
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    llm = LLM(
        None, ["model.dtype=bfloat16", "quantization=packed", f"device.threads={THREADS}", "scheduler.max_running=64"]
    )

    def generate(prompts: list[list[int]], count: int) -> float:
        llm.engine.scheduler.cache.reset()
        began = time.perf_counter()
        done = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        seconds = time.perf_counter() - began
        assert all(len(c.token_ids) == count for c in done)
        return seconds

    return generate


def transformers_side() -> Callable[[list[list[int]], int], float]:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from engine.compose import resolve_source
    from engine.config.model import EngineConfig
    from engine.registry import Registry

    torch.set_num_threads(THREADS)
    registry = Registry.discover()
    path = resolve_source(EngineConfig(), registry, lambda share, words: None).path
    offer = registry.get("weight_loaders", "gguf").offer
    loader = offer.build(offer.options())
    config = loader.config(path)
    source = loader.open(path, config)
    model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16).eval()
    weights = {name: source.get(name, torch.bfloat16) for name in source.names()}
    missing = model.load_state_dict(weights, strict=False).missing_keys
    assert set(missing) <= {"lm_head.weight"}, missing
    model.tie_weights()

    def generate(prompts: list[list[int]], count: int) -> float:
        ids = torch.tensor(prompts)
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count, do_sample=False
            )
        seconds = time.perf_counter() - began
        assert out.shape[1] == len(prompts[0]) + count
        return seconds

    return generate


def versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("engine-llm", "torch", "transformers")} | {
        "python": platform.python_version()
    }


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name, make in (("engine", engine_side), ("transformers", transformers_side)):
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, make), daemon=True).start()
        assert pipes[name].recv() == "ready"
    rounds: list[dict[str, Any]] = []
    with Progress() as progress:
        task = progress.add_task("measuring", total=given.rounds * 2)
        for number in range(given.rounds):
            got = {}
            for name, pipe in pipes.items():
                pipe.send(100 * number)
                got[name] = pipe.recv()
                progress.advance(task)
            rounds.append(got)
    for pipe in pipes.values():
        pipe.send(None)
    show(rounds)
    if given.json:
        given.json.write_text(json.dumps({"versions": versions(), "rounds": rounds}, indent=1))


def show(rounds: list[dict[str, Any]]) -> None:
    table = Table(title=f"SmolLM2-135M bf16, {THREADS} threads, {len(rounds)} rounds in turn; {versions()}")
    for column in ("", "engine", "transformers", "ratio (min–max)"):
        table.add_column(column, justify="left" if not column else "right")
    for measure, unit in MEASURES.items():
        ours, theirs = ([r[side][measure] for r in rounds] for side in ("engine", "transformers"))
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        table.add_row(
            f"{measure}, {unit}",
            f"{statistics.median(ours):,.1f}",
            f"{statistics.median(theirs):,.1f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})",
        )
    rich.print(table)


if __name__ == "__main__":
    main()
