"""Quantizations of the default model on this machine's CPU, in turn: A, B, A, B.

    python benchmarks/cpu/quantization.py [NAME …] [--rounds 3] [--kernels]

Each lives in an engine and a process of its own and is idle while another is measured. Prints medians, and ratios to
the first name within each round: rates drift by the minute on shared machines, ratios do not. `--kernels` times the
matrix products of a step alone, in one process: milliseconds for all of them, by the number of rows.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection

import rich
from against_transformers import THREADS, random_prompts, serve, versions
from rich.table import Table

NAMES = ("packed", "blocks", "int8")
ROWS = (1, 4, 16, 64)
MEASURES = ("1 stream, tok/s", "16 at once, tok/s", "64 at once, tok/s", "prefill 2,048, tok/s")

Generate = Callable[[list[list[int]], int], float]


def side(name: str) -> Generate:
    """Seconds that prompts take, all at once, each with so many new tokens."""
    from engine.llm import LLM
    from engine.sampling_params import SamplingParams

    settings = ["model.dtype=bfloat16", f"device.threads={THREADS}", "scheduler.max_running=64"]
    llm = LLM(None, [*settings, f"quantization={name}"])

    def generate(prompts: list[list[int]], count: int) -> float:
        llm.engine.scheduler.cache.reset()
        began = time.perf_counter()
        llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True))
        return time.perf_counter() - began

    return generate


def rates(generate: Generate, seed: int) -> dict[str, float]:
    """Measure one side: prompts of 128 tokens, 64 out where many run at once."""
    (prompt,) = random_prompts(1, 128, seed)
    whole, first = generate([prompt], 129), generate([prompt[::-1]], 1)
    return {
        MEASURES[0]: 128 / (whole - first),
        MEASURES[1]: 16 * 64 / generate(random_prompts(16, 128, seed + 1), 64),
        MEASURES[2]: 64 * 64 / generate(random_prompts(64, 128, seed + 2), 64),
        MEASURES[3]: 2048 / generate(random_prompts(1, 2048, seed + 3), 1),
    }


def engines(names: Sequence[str], rounds: int) -> None:
    """Whole engines."""
    context = multiprocessing.get_context("spawn")
    pipes: dict[str, Connection] = {}
    for name in names:
        pipes[name], theirs = context.Pipe()
        context.Process(target=serve, args=(theirs, partial(side, name), rates), daemon=True).start()
        assert pipes[name].recv() == "ready"
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for number in range(rounds):
        for name, pipe in pipes.items():
            pipe.send(100 * number)
            found[name].append(pipe.recv())
    for pipe in pipes.values():
        pipe.send(None)
    table = Table(title=f"SmolLM2-135M (GGUF Q4_1), {THREADS} threads, {rounds} rounds in turn; {versions()}")
    for column in ("", *names):
        table.add_column(column, justify="left" if not column else "right")
    for measure in MEASURES:
        base = [one[measure] for one in found[names[0]]]
        cells = []
        for name in names:
            values = [one[measure] for one in found[name]]
            ratios = [value / first for value, first in zip(values, base, strict=True)]
            cells.append(f"{statistics.median(values):,.1f} ({statistics.median(ratios):.2f})")
        table.add_row(measure, *cells)
    rich.print(table)


def kernels(names: Sequence[str], rounds: int) -> None:
    """The products of one step: 30 layers of four, and the output layer."""
    import torch
    from kernels import HIDDEN, INTERMEDIATE, LAYERS, SIZES, VOCAB, noise, seconds

    from engine.device import detect
    from engine.registry import Registry
    from engine.specs.quantization import Linear, Quantization
    from engine.testing.checkpoints import TensorWeights

    torch.set_num_threads(THREADS)
    shapes = [size for _ in range(LAYERS) for size in SIZES]
    source = TensorWeights({f"{n}x{k}": noise(n, k) for n, k in SIZES})
    embedding, registry = noise(VOCAB, HIDDEN), Registry.discover()
    layers: dict[str, list[Linear]] = {}
    for name in names:
        offer = registry.get("quantizations", name).offer
        built: Quantization = offer.build(offer.options(), device=detect("cpu"), dtype=torch.bfloat16)
        layers[name] = [*(built.linear(source, [f"{n}x{k}"]) for n, k in shapes), built.head(embedding)]
    print(f"{'rows':<6}" + "".join(f"{name + ', ms':>14}" for name in names))
    for rows in ROWS:
        inputs = {k: noise(rows, k) for k in (HIDDEN, INTERMEDIATE)}

        def step(name: str, inputs: dict[int, torch.Tensor] = inputs) -> None:
            for layer in layers[name]:
                layer(inputs[layer.in_features])

        times = [[seconds(partial(step, name), 0.02) for name in names] for _ in range(rounds + 1)][1:]
        best = [min(column) for column in zip(*times, strict=True)]
        print(f"{rows:<6}" + "".join(f"{1e3 * value:>14.2f}" for value in best), flush=True)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES), help="quantizations; ratios are to the first")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kernels", action="store_true", help="time the products alone")
    given = parser.parse_args()
    (kernels if given.kernels else engines)(given.names, given.rounds)


if __name__ == "__main__":
    main()
