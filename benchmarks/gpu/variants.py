"""One decode step of Qwen2.5-7B's shape as a graph, alone, under other tilings: microseconds a replay.

    python benchmarks/gpu/variants.py [--profile]

With `--profile`: the kernels of decode steps and of a prefill by time, and the device's idle share between them.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode import prompts
from limits import timed, versions
from shape import write
from torch.profiler import ProfilerActivity, profile

from engine import LLM, SamplingParams
from engine.cuda.graphs import Graphs
from engine.cuda.inputs import GREEDY, RowInputs
from engine.plugins.attention.triton.backend import Tiles
from engine.plugins.quantization.narrow.kernel import Tiling

POOL = 40_000
"""Pages that the engine below is sure to have."""

TILINGS: dict[tuple[str, int], list[Tiling | None]] = {
    ("gate_up", 16): [Tiling(64, 128, 1, 4, 4), Tiling(64, 64, 1, 4, 6, 512), Tiling(64, 128, 1, 4, 3, 1024)],
    ("down", 16): [Tiling(64, 128, 2, 4, 6, 2048), Tiling(64, 128, 4, 4, 4), Tiling(64, 128, 4, 4, 4, 2048)],
    ("qkv", 16): [Tiling(64, 128, 2, 4, 4, ahead) for ahead in (1024, 2048)] + [Tiling(64, 128, 4, 4, 3, 1024)],
    ("out", 16): [Tiling(64, 128, 2, 4, 4, ahead) for ahead in (1024, 2048)] + [Tiling(64, 128, 4, 4, 3, 1024)],
    ("gate_up", 64): [Tiling(128, 64, 1, 8, 4), Tiling(128, 64, 1, 4, 4), Tiling(256, 64, 1, 8, 3)],
    ("down", 64): [Tiling(128, 64, 4, 8, 4), Tiling(128, 64, 9, 8, 4), Tiling(128, 128, 4, 8, 3)],
    ("qkv", 64): [Tiling(128, 64, 3, 8, 4), Tiling(128, 64, 7, 8, 4), Tiling(64, 128, 3, 4, 3)],
    ("out", 64): [Tiling(128, 64, 4, 8, 4), Tiling(128, 64, 9, 8, 4), Tiling(64, 128, 4, 4, 3)],
    ("head", 64): [Tiling(128, 64, 1, 8, 4), Tiling(256, 64, 1, 8, 3)],
}


class Variants:
    """An engine in this process whose parts are changed under it."""

    def __init__(self, *, graphs: bool) -> None:
        folder = Path(tempfile.mkdtemp())
        write(folder)
        given = {
            "model.source": f"path:{folder}",
            "model.loader": "dummy",
            "scheduler.max_running": 256,
            "scheduler.token_budget": 8192,
            "model.max_context": 16384,
            "kv_cache.memory": "40GiB",
            "device.cuda_graphs": graphs,
        }
        self.llm = LLM(overrides=[f"{key}={value}" for key, value in given.items()])
        executor: Any = self.llm.engine.executor
        self.runner: Any = executor._runner
        while graphs and any(made.next for made in (self.runner._decodes, self.runner._spread, self.runner._shared)):
            time.sleep(0.2)  # the executor's thread captures
        executor._thread.submit(lambda: None).result()
        self.linears: dict[str, list[Any]] = {"head": [self.runner.model._head]}
        for layer in self.runner.model._layers:
            for name in ("qkv", "out", "gate_up", "down"):
                part = layer if name in ("qkv", "out") else layer.feed_forward
                self.linears.setdefault(name, []).append(getattr(part, name))
        self.kept = {name: dict(found[0]._tilings) for name, found in self.linears.items()}
        self.linears["head"][0]._workspace.reserve(2**25)

    @torch.inference_mode()
    def step(self, size: int, length: int, shared: int = 0) -> float:
        """Microseconds of a replay with every request at one length, of which the first `shared` pages are common."""
        self.runner._inputs_on_device.send(_rows(size, -(-length // 16), length, shared), size)
        made = Graphs(partial(self.runner._decode, shared=shared > 0), [size], torch.cuda.graph_pool_handle())
        self.runner._decode(size, shared=shared > 0)
        made.capture_next()
        return timed(lambda: made.replay(size), 20)

    def show(self, note: str, sizes: tuple[int, ...], length: int = 260, shared: int = 0) -> None:
        try:
            cells = [f"{size}: {self.step(size, length, shared):7.1f}" for size in sizes]
        except Exception as error:  # a tiling that the chip has no room for
            cells = [type(error).__name__]
        print(f"{note:64} {length:5}  " + "  ".join(cells), flush=True)

    def tile(self, name: str, rows: int, tiling: Tiling | None) -> None:
        for linear in self.linears[name]:
            linear._tilings[rows] = tiling

    def products(self) -> None:
        for (name, rows), choices in TILINGS.items():
            for tiling in choices:
                self.tile(name, rows, tiling)
                self.show(f"{name} {tiling}", (1, 8) if rows == 16 else (64,))
            self.tile(name, rows, self.kept[name][rows])

    def attention(self) -> None:
        backend = self.runner.backend
        usual = backend._decode, backend._wanted
        for tiles in (Tiles(128, 4, 3), Tiles(64, 4, 3), Tiles(64, 4, 4), Tiles(32, 4, 6)):
            for wanted in (33, 66, 132):
                backend._decode, backend._wanted = tiles, wanted
                self.show(f"attention {tiles} {wanted}", (1, 64), 300)
                self.show(f"attention {tiles} {wanted}", (1, 64), 8300)
        backend._decode, backend._wanted = usual

    def prefixes(self) -> None:
        for shared in (0, 16, 250):
            self.show(f"{shared} pages shared", (16, 64, 200), 4200, shared)

    def profile(self, batch: int, length: int, out: int) -> None:
        """Kernels by time, and the idle share between them, in the second half of a run."""
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        self.llm.generate(prompts(batch, length, 1), params)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.llm.generate(prompts(batch, length, 2), params)
        spans = sorted(
            (e.time_range.start, e.time_range.end, e.name) for e in seen.events() if "CUDA" in str(e.device_type)
        )
        spans = spans[len(spans) // 2 :] if out > 1 else spans
        busy, idle, reach = 0.0, 0.0, spans[0][0]
        names: dict[str, list[float]] = {}
        for start, end, name in spans:
            idle += max(0.0, start - reach)
            busy += max(0.0, end - max(start, reach))
            reach = max(reach, end)
            names.setdefault(name, []).append(end - start)
        print(f"{batch} x {length} + {out}: idle {idle / (busy + idle):.3f} of {(busy + idle) / 1e3:.1f} ms")
        for name, took in sorted(names.items(), key=lambda pair: -sum(pair[1]))[:12]:
            print(f"   {sum(took) / 1e3:8.2f} ms {len(took):6} x {sum(took) / len(took):7.1f} µs  {name[:90]}")


def _rows(size: int, pages: int, length: int, shared: int) -> RowInputs:
    tables = (np.arange(size * pages, dtype=np.int32) % POOL).reshape(size, pages)
    tables[:, :shared] = tables[0, :shared]
    slots, ones = np.arange(size), np.ones(size, dtype=np.int32)
    return RowInputs(
        slots=slots,
        starts=ones * (length - 1),
        counts=ones,
        first_pages=ones * 0,
        pages=dict(enumerate(tables)),
        ids={},
        sampling=np.array([GREEDY] * size),
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--profile", action="store_true")
    given = arguments.parse_args()
    print(versions())
    torch.cuda.set_stream(torch.cuda.Stream())
    variants = Variants(graphs=given.profile)
    if given.profile:
        for batch, length, out in ((1, 128, 64), (64, 128, 64), (256, 128, 64), (1, 8192, 1)):
            variants.profile(batch, length, out)
    else:
        variants.show("as it is", (1, 8, 16, 32, 64, 256))
        variants.prefixes()
        variants.products()
        variants.attention()
    variants.llm.close()


if __name__ == "__main__":
    main()
