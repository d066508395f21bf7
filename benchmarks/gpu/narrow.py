"""Products of few rows with the weights of Qwen2.5-7B: tilings of our kernel against cuBLAS, in bytes a second.

python benchmarks/gpu/narrow.py [--rows 1,8,64] [--quick]
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path

import torch
import triton
from torch.nn import functional

sys.path.insert(0, str(Path(__file__).parent))
from limits import graphed, versions

from engine.plugins.quantization.narrow.kernel import Tiling, narrow

SHAPES = {
    "qkv": (4608, 3584),
    "out": (3584, 3584),
    "gate_up": (37888, 3584),
    "down": (3584, 18944),
    "head": (152064, 3584),
}


def tilings(n: int, k: int, rows: int) -> list[Tiling]:
    """Those worth a look: enough programs to fill the chip, not too many parts."""
    found = []
    for height, depth, split, (warps, stages) in itertools.product(
        (32, 64, 128), (64, 128, 256), (1, 2, 4, 8), ((4, 3), (4, 5), (8, 3))
    ):
        programs = triton.cdiv(n, height) * split
        memory = stages * depth * (height + max(16, rows)) * 2
        if (
            programs >= 132
            and (split == 1 or programs <= 132 * 8)
            and 64 * 1024 <= memory <= 160 * 1024
            and k % depth == 0
        ):
            found.append(Tiling(height, depth, split, warps, stages))
    return found


def measure(name: str, m: int, keep: int) -> None:
    n, k = SHAPES[name]
    copies = max(2, int(600e6 / (n * k * 2)) + 1)  # more than the L2 holds
    weights = [torch.randn(n, k, device="cuda", dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    want = functional.linear(x, weights[0])
    bytes_read = n * k * 2
    state = itertools.cycle(weights)
    base = graphed(lambda: functional.linear(x, next(state)), 2 * copies)
    rows = max(16, triton.next_power_of_2(m))
    y = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)
    counters = torch.zeros(8192, device="cuda", dtype=torch.int32)
    results = []
    for tiling in tilings(n, k, rows):
        tiles = triton.cdiv(n, tiling.rows)
        partials = torch.empty(tiles * tiling.split * tiling.rows * rows, device="cuda", dtype=torch.float32)

        def run(
            weight: torch.Tensor | None = None,
            tiling: Tiling = tiling,
            tiles: int = tiles,
            partials: torch.Tensor = partials,
        ) -> None:
            narrow[(tiles, tiling.split)](
                x, next(state) if weight is None else weight, x, y, partials, counters, m, n, k, k,
                M=rows, ROWS=tiling.rows, DEPTH=tiling.depth, SPLIT=tiling.split, BIAS=False, STAGES=tiling.stages,
                num_warps=tiling.warps,
            )  # fmt: skip

        try:
            run(weights[0])
            torch.testing.assert_close(y, want, atol=3e-2, rtol=3e-2)
            results.append((graphed(run, 2 * copies), tiling))
        except triton.runtime.errors.OutOfResources:
            continue
    results.sort(key=lambda pair: pair[0])
    print(f"{name:8} m={m:3}  cuBLAS {base:7.1f} µs {bytes_read / base / 1e6:5.2f} TB/s", flush=True)
    for took, tiling in results[:keep]:
        print(f"    {took:7.1f} µs {bytes_read / took / 1e6:5.2f} TB/s  {tiling}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rows", default="1,16,64")
    arguments.add_argument("--shapes", default=",".join(SHAPES))
    arguments.add_argument("--keep", type=int, default=3)
    given = arguments.parse_args()
    print(versions())
    for name in given.shapes.split(","):
        for m in map(int, given.rows.split(",")):
            measure(name, m, given.keep)


if __name__ == "__main__":
    main()
