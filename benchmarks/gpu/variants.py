"""One decode step of Qwen2.5-7B's shape as a graph, alone, under changed tilings: microseconds a replay.

python benchmarks/gpu/variants.py
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))
import decode as whole
from limits import timed, versions

import engine.ops.triton_ops as ops
import engine.plugins.attention.triton.backend as attention
import engine.plugins.quantization.narrow.linear as narrow
from engine.cuda.graphs import Graphs
from engine.plugins.attention.triton.backend import Tiles
from engine.plugins.quantization.narrow.kernel import Tiling


def main() -> None:
    print(versions())
    bench = whole.Bench(["kv_cache.memory=40GiB"])
    runner = bench.llm.engine.executor._runner
    while runner._spread.next is not None or runner._decodes.next is not None:
        time.sleep(0.2)  # the executor's thread captures
    bench.llm.engine.executor._thread.submit(lambda: None).result()
    torch.cuda.set_stream(torch.cuda.Stream())
    linears = {}
    for layer in runner.model._layers:
        for name in ("qkv", "out", "gate_up", "down"):
            linears.setdefault(name, []).append(getattr(layer, name))
    linears["head"] = [runner.model._head]
    kept = {name: dict(found[0]._tilings) for name, found in linears.items()}

    @torch.inference_mode()
    def step(size: int, length: int) -> float:
        """Microseconds of a replay with every request at one length."""
        inputs = runner._inputs_on_device
        pages = -(-length // 16)
        rows = [whole_row(slot, length, pages, slot * pages) for slot in range(size)]
        inputs.send(rows, size)
        runner._decode(size)
        graphs = Graphs(runner._decode, [size], torch.cuda.graph_pool_handle())
        graphs.capture_next()
        took = timed(lambda: graphs.replay(size), 30)
        del graphs
        return took

    def show(note: str, sizes: tuple[int, ...], length: int = 260) -> None:
        try:
            cells = [f"{size}: {step(size, length):7.1f}" for size in sizes]
            print(f"{note:60} {length:5}  " + "  ".join(cells), flush=True)
        except Exception as error:
            print(note, type(error).__name__, str(error)[:100], flush=True)

    def early(on: bool) -> None:
        for module in (ops, attention, narrow):
            module.EARLY = on

    def tile(name: str, rows: int, tiling: Tiling | None) -> None:
        for linear in linears[name]:
            linear._tilings[rows] = tiling

    def reset() -> None:
        for name, tilings in kept.items():
            for rows, tiling in tilings.items():
                tile(name, rows, tiling)

    narrow_workspace = linears["down"][0]._workspace
    narrow_workspace.reserve(2**25)
    show("as it is", (1, 8, 16, 32, 64, 256))
    narrow.MOST_FUSED = 0
    show("not fused", (1, 8, 16, 32, 64))
    for name in linears:
        tile(name, 64, None)
        if name not in ("qkv", "out"):
            reset()
    show("not fused, cuBLAS for qkv and out", (64,))
    reset()
    narrow.MOST_FUSED = 64
    early(False)
    show("no early launches", (1, 8, 64))
    early(True)
    for name, rows, sizes, choices in (
        ("gate_up", 16, (1, 8), (Tiling(64, 128, 1, 4, 3), Tiling(64, 128, 1, 4, 5), Tiling(64, 256, 1, 4, 3), Tiling(64, 256, 1, 8, 3), Tiling(128, 128, 1, 8, 4), Tiling(128, 128, 1, 4, 3), Tiling(64, 64, 1, 4, 8), Tiling(32, 256, 1, 4, 4))),
        ("down", 16, (1, 8), (Tiling(64, 128, 4, 4, 4), Tiling(64, 256, 4, 4, 3), Tiling(64, 256, 8, 4, 3), Tiling(128, 128, 8, 8, 4), Tiling(64, 128, 8, 4, 5), Tiling(64, 128, 2, 4, 6))),
        ("qkv", 16, (1, 8), (Tiling(64, 128, 2, 4, 5), Tiling(64, 256, 2, 4, 3), Tiling(64, 256, 4, 4, 3), Tiling(32, 256, 2, 4, 3))),
        ("out", 16, (1, 8), (Tiling(64, 128, 2, 4, 5), Tiling(64, 256, 4, 4, 3), Tiling(32, 256, 2, 4, 4), Tiling(64, 128, 7, 4, 4))),
        ("gate_up", 64, (64,), (Tiling(64, 128, 1, 4, 3), Tiling(128, 128, 1, 8, 3), Tiling(128, 64, 1, 8, 4), Tiling(128, 64, 1, 4, 4), Tiling(256, 64, 1, 8, 3))),
        ("down", 64, (64,), (Tiling(128, 64, 4, 8, 3), Tiling(128, 64, 8, 8, 3), Tiling(64, 64, 4, 4, 5), Tiling(128, 128, 8, 8, 3))),
        ("qkv", 64, (64,), (Tiling(64, 128, 2, 4, 3), Tiling(128, 64, 4, 8, 3), Tiling(64, 64, 4, 4, 5))),
        ("out", 64, (64,), (Tiling(64, 128, 2, 4, 3), Tiling(128, 64, 4, 8, 3), Tiling(64, 64, 4, 4, 5))),
    ):  # fmt: skip
        for tiling in choices:
            tile(name, rows, tiling)
            show(f"{name} {tiling}", sizes)
        reset()
    backend = runner.backend
    usual = backend._decode
    for tiles, wanted in (
        (Tiles(128, 4, 3), 66),
        (Tiles(128, 4, 3), 33),
        (Tiles(128, 4, 4), 66),
        (Tiles(128, 4, 3), 132),
        (Tiles(256, 8, 3), 66),
    ):
        backend._decode, backend._wanted = tiles, wanted
        show(f"attention {tiles} {wanted}", (1, 64), 8300)
    backend._decode, backend._wanted = usual, 66
    bench.llm.close()


def whole_row(slot: int, length: int, pages: int, first: int) -> object:
    import numpy as np

    from engine.cuda.inputs import GREEDY, RowInput

    known = np.arange(first, first + pages, dtype=np.int32)
    return RowInput(slot=slot, start=length - 1, count=1, first_page=0, new_pages=known, ids=None, sampling=GREEDY)


if __name__ == "__main__":
    main()
