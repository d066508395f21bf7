"""Routed experts with the shape of DeepSeek-V2-Lite: the kernels alone, and a decode step of the model as a graph.

    python benchmarks/gpu/moe.py [--kernels] [--tune] [--step] [--profile] [--engine [--set KEY=VALUE …]]

Kernels: one layer's experts, 64 routed and the shared network as two more, for tokens that a random router spreads.
The floor counts the weights of the experts that were hit at 4.69 TB/s, or the products at 790 TFLOP/s. Step: random
weights on the device, attention left out (its output is its input), so what is shown is everything else. Engine: the
whole of it, as in `decode.py`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from decode import Bench
from limits import graphed, timed, versions
from torch.profiler import ProfilerActivity, profile

from engine.device import detect
from engine.ops import grouped
from engine.ops.experts import Stack
from engine.ops.grouped import Cut, Tiling
from engine.ops.triton_ops import TritonOps
from engine.plugins.models import deepseek
from engine.plugins.quantization import narrow
from engine.routing import Routing
from engine.specs.model import Forward
from engine.specs.weight_loader import WeightSource

CONFIG = json.loads((Path(__file__).parents[2] / "examples/plan/deepseek-v2-lite/config.json").read_text())
RULE = Routing(scoring="softmax", experts=64, chosen=6, always=2)
HIDDEN, INNER = 2048, 1408
READ, PRODUCTS = 4.69e12, 790e12

UPS = [Tiling(64, 128, 4, s) for s in (2, 3, 4)] + [Tiling(64, 64, 4, 4), Tiling(64, 64, 4, 6), Tiling(128, 64, 4, 4)]
DOWNS = [Tiling(64, 128, 4, s) for s in (2, 3, 4, 6)] + [Tiling(64, 64, 4, 6), Tiling(128, 64, 4, 4)]
WIDE = [
    Tiling(128, 64, 4, 4),
    Tiling(128, 64, 8, 4),
    Tiling(128, 64, 8, 3),
    Tiling(256, 64, 8, 3),
    Tiling(256, 64, 8, 4),
]


def randn(*shape: int, size: float = 1.0) -> Tensor:
    return torch.empty(shape, device="cuda", dtype=torch.bfloat16).normal_(0, size)


class Layer:
    """One layer's experts and their kernels."""

    def __init__(self) -> None:
        self.ops = TritonOps()
        self.router = randn(RULE.experts, HIDDEN, size=HIDDEN**-0.5)
        self.gate_up = Stack(randn(66, 2 * INNER, HIDDEN, size=HIDDEN**-0.5))
        self.down = Stack(randn(66, HIDDEN, INNER, size=INNER**-0.5))

    def inputs(self, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
        x = randn(tokens, HIDDEN)
        return x, *self.ops.route(x, self.router, None, RULE)

    def floor(self, ids: Tensor) -> float:
        """Microseconds."""
        hit = len(ids.unique()) * 3 * HIDDEN * INNER
        return max(hit * 2 / READ, ids.numel() * 6 * HIDDEN * INNER / PRODUCTS) * 1e6

    def time(self, tokens: int, cut: Cut | None = None) -> dict[str, float]:
        """Microseconds of each kernel, over inputs that take turns."""
        sets = [self.inputs(tokens) for _ in range(8 if tokens <= 8 else 2)]
        cut = cut or grouped.choose_cut(tokens, RULE.taken, 66)
        orders = [grouped._arrange(ids, 66, cut.block, 2) for _, ids, _ in sets]
        active = [randn(tokens * RULE.taken, INNER) for _ in sets]
        made = randn(tokens * RULE.taken, HIDDEN)
        number = itertools.cycle(range(len(sets)))

        def up() -> None:
            i = next(number)
            grouped._multiply(sets[i][0], self.gate_up, active[i], orders[i], cut.block, cut.up, share=8, gated=True)

        def down() -> None:
            i = next(number)
            grouped._multiply(active[i], self.down, made, orders[i], cut.block, cut.down, factors=sets[i][2])

        runs: dict[str, Callable[[], Any]] = {
            "route": lambda: self.ops.route(sets[next(number)][0], self.router, None, RULE),
            "arrange": lambda: grouped._arrange(sets[next(number)][1], 66, cut.block, 2),
            "up": up,
            "down": down,
            "mix": lambda: grouped.mix(*sets[next(number)], self.gate_up, self.down, 2),
        }
        found = {name: graphed(run, len(sets)) for name, run in runs.items()}
        return found | {"floor": self.floor(sets[0][1]), "experts": len(sets[0][1].unique())}


def kernels() -> None:
    layer = Layer()
    for tokens in (1, 2, 8, 16, 32, 64, 128, 256, 512, 1024, 4096):
        cells = "  ".join(f"{name} {took:7.1f}" for name, took in layer.time(tokens).items())
        print(f"{tokens:5} tokens  {cells}", flush=True)


def tune() -> None:
    layer = Layer()
    first = [(64, 16), (8, 16), (1, 16), (256, 32), (4096, 128)]
    for tokens, block in [*first, (256, 64), (64, 32), (1024, 64), (1024, 128), (4096, 64)]:
        pairs = zip(UPS, DOWNS, strict=True) if tokens <= 256 else zip(WIDE, WIDE, strict=True)
        for up, down in pairs:
            try:
                found = layer.time(tokens, Cut(block, up, down))
                cells = "  ".join(f"{name} {found[name]:7.1f}" for name in ("up", "down", "floor"))
            except Exception as error:  # a tiling that the chip has no room for
                cells = f"{type(error).__name__}: {str(error)[:80]}"
            print(f"{tokens:5} x{block:4} {cells}  {up} {down}", flush=True)


class DeviceWeights(WeightSource):
    """Random weights made where they are wanted."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}

    def names(self) -> Iterable[str]:
        return self._shapes

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def origin(self, name: str) -> str:
        return "the device"

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = dict(shapes)

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        shape = self._shapes[name]
        values = torch.ones(shape, device="cuda") if len(shape) == 1 else randn(*shape, size=0.02)
        return values.to(dtype) if rows is None else values[rows].to(dtype)

    def digest(self) -> str:
        return "random"

    def close(self) -> None:
        """Nothing is open."""


class NoAttention(Forward):
    """What attention takes is what it gives."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        return q[..., : CONFIG["kv_lora_rank"]].contiguous()


class Step:
    """The model without attention."""

    def __init__(self) -> None:
        (offer,), (linears,) = deepseek.models(), narrow.quantizations()
        device = torch.device("cuda")
        self.ops = TritonOps()
        self.model: Any = offer.build(
            offer.options(),
            config=CONFIG,
            profile=offer.profile(CONFIG | {"max_position_embeddings": 16384}),
            weights=DeviceWeights(),
            linears=linears.build(linears.options(), device=detect("cuda"), dtype=torch.bfloat16),
            ops=self.ops,
            device=device,
            dtype=torch.bfloat16,
        )

    def run(self, tokens: Tensor) -> Tensor:
        hidden = self.model.forward(tokens, torch.arange(len(tokens), device="cuda") % 300, NoAttention())
        logits: Tensor = self.model.logits(hidden[-256:])
        return logits

    @torch.inference_mode()
    def show(self, count: int) -> None:
        ids = torch.randint(1000, 100000, (count,), device="cuda")
        took = graphed(lambda: self.run(ids))
        print(f"{count:5} tokens  {took:9.1f} µs a step without attention, {count / took * 1e6:9.0f} tok/s", flush=True)

    @torch.inference_mode()
    def spread(self, count: int) -> None:
        """Experts that so many tokens hit, layer by layer."""
        route, hit = self.ops.route, []

        def counting(*given: Any) -> Any:
            found = route(*given)
            hit.append(len(found[0].unique()) - RULE.always)
            return found

        self.ops.route = counting  # type: ignore[method-assign]
        self.run(torch.randint(1000, 100000, (count,), device="cuda"))
        self.ops.route = route  # type: ignore[method-assign]
        print(f"experts of 64 that {count} tokens hit: {hit}", flush=True)

    @torch.inference_mode()
    def profile(self, count: int) -> None:
        ids = torch.randint(1000, 100000, (count,), device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run(ids)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                self.run(ids)
            timed(graph.replay, 5)
            with profile(activities=[ProfilerActivity.CUDA]) as seen:
                graph.replay()
                torch.cuda.synchronize()
        names: dict[str, list[float]] = {}
        for event in seen.events():
            if "CUDA" in str(event.device_type):
                names.setdefault(event.name, []).append(event.time_range.end - event.time_range.start)
        print(
            f"{count} tokens: {sum(map(sum, names.values())) / 1e3:.2f} ms in kernels (early ones count their waiting)"
        )
        for name, took in sorted(names.items(), key=lambda pair: -sum(pair[1]))[:16]:
            print(f"   {sum(took):9.1f} µs {len(took):5} x {sum(took) / len(took):7.1f}  {name[:100]}", flush=True)


class Engine(Bench):
    """The whole engine with dummy weights."""

    config = CONFIG | {"max_position_embeddings": 16384}
    floors = {1: 955, 8: 2088, 64: 9532, 256: 36201}
    reach = {1: 450, 8: 1500, 64: 7400, 256: 25000}

    def prompt(self) -> None:
        """The time to the first token of 4,096, and of so many again."""
        for name, again in (("TTFT 4096 cold", False), ("TTFT 4096 hit", True)):
            found = []
            for _ in range(3):
                request = self.fresh(1, 4096)
                for _ in range(2 if again else 0):  # the second sight admits its prefix
                    self.run(request, 1)
                found.append(self.run(request, 1) * 1e3)
            self.note(name, sorted(found)[1], f"{sorted(found)[1]:8.1f} ms" + ("" if again else ", limit 26, reach 70"))
        rate = max(4 * 8192 / self.run(self.fresh(4, 8192), 1) for _ in range(2))
        self.note("prefill 4 x 8192", rate, f"{rate:8.0f} tok/s")


def engine(overrides: list[str], batches: list[int], rounds: int) -> None:
    bench = Engine(["kv_cache.memory=20GiB", *overrides])
    bench.rounds = rounds
    bench.run(bench.fresh(1, 16), 1)
    bench.note("start", 0, "the first token is there")
    time.sleep(8)  # graphs come in behind
    for batch in batches:
        bench.decode(batch)
    bench.prompt()
    bench.close()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for part in ("kernels", "tune", "step", "profile"):
        arguments.add_argument(f"--{part}", action="store_true")
    arguments.add_argument("--engine", action="store_true")
    arguments.add_argument("--batches", default="1,8,64,256")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    given = arguments.parse_args()
    print(versions())
    if given.kernels:
        kernels()
    if given.tune:
        tune()
    if given.engine:
        engine(given.overrides, [int(batch) for batch in given.batches.split(",")], given.rounds)
    if given.step or given.profile:
        step = Step()
        step.spread(64)
        for count in (1, 8, 64, 256, 4096):
            step.show(count)
            if given.profile:
                step.profile(count)


if __name__ == "__main__":
    main()
