"""One decode step of Qwen2.5-7B's shape as a graph, alone, under other tilings: microseconds a replay.

    python benchmarks/gpu/variants.py [--profile]

With `--profile`: the kernels of decode steps and of a prefill by time, and the device's idle share between them.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode import CONFIG, prompts
from limits import timed, versions
from torch.profiler import ProfilerActivity, profile

import engine.ops.triton_ops as ops
import engine.plugins.attention.triton.backend as attention
import engine.plugins.quantization.narrow.linear as narrow
from engine import LLM, SamplingParams
from engine.cuda.graphs import Graphs
from engine.cuda.inputs import GREEDY, RowInput
from engine.plugins.attention.triton.backend import Tiles
from engine.plugins.quantization.narrow.kernel import Tiling

TILINGS: list[tuple[str, int, list[Tiling | None]]] = [
    ("gate_up", 16, [Tiling(64, 128, 1, 4, s) for s in (3, 5)] + [Tiling(64, 256, 1, 4, 3), Tiling(64, 256, 1, 4, 2)]),
    ("gate_up", 16, [Tiling(64, 64, 1, 4, 6), Tiling(64, 64, 1, 4, 4), Tiling(128, 64, 1, 4, 4)]),
    ("down", 16, [Tiling(64, 128, 4, 4, s) for s in (3, 4)] + [Tiling(64, 128, 2, 4, 6), Tiling(64, 256, 4, 4, 3)]),
    ("down", 16, [Tiling(64, 128, 8, 4, 3), Tiling(64, 64, 4, 4, 6), Tiling(64, 128, 3, 4, 5)]),
    (
        "qkv",
        16,
        [Tiling(64, 128, 4, 4, 3), Tiling(64, 256, 4, 4, 3), Tiling(64, 128, 2, 4, 4), Tiling(32, 128, 2, 4, 4)],
    ),
    (
        "out",
        16,
        [Tiling(64, 128, 4, 4, 3), Tiling(64, 256, 4, 4, 2), Tiling(64, 128, 2, 4, 4), Tiling(64, 128, 7, 4, 4)],
    ),
    ("head", 16, [Tiling(64, 128, 1, 4, 3), Tiling(64, 128, 1, 4, 5)]),
    ("gate_up", 64, [None, Tiling(128, 64, 1, 8, 4), Tiling(128, 64, 1, 4, 3), Tiling(64, 64, 1, 4, 4)]),
    ("down", 64, [None, Tiling(64, 64, 4, 4, 5), Tiling(64, 64, 4, 4, 4), Tiling(64, 128, 4, 8, 3)]),
    ("qkv", 64, [Tiling(64, 128, 2, 4, 3), Tiling(64, 64, 2, 4, 5), Tiling(64, 64, 4, 4, 4)]),
    ("out", 64, [Tiling(64, 128, 4, 4, 3), Tiling(64, 64, 4, 4, 4)]),
]


class Variants:
    """An engine in this process whose parts are changed under it."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(CONFIG))
        words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
        (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))
        given = {
            "model.source": f"path:{folder}",
            "model.loader": "dummy",
            "scheduler.max_running": 256,
            "scheduler.token_budget": 8192,
            "model.max_context": 16384,
            "kv_cache.memory": "40GiB",
        }
        self.llm = LLM(overrides=[f"{key}={value}" for key, value in given.items()])
        executor: Any = self.llm.engine.executor
        self.runner: Any = executor._runner
        while self.runner._spread.next is not None or self.runner._decodes.next is not None:
            time.sleep(0.2)  # the executor's thread captures
        executor._thread.submit(lambda: None).result()
        self.linears: dict[str, list[Any]] = {"head": [self.runner.model._head]}
        for layer in self.runner.model._layers:
            for name in ("qkv", "out", "gate_up", "down"):
                self.linears.setdefault(name, []).append(getattr(layer, name))
        self.kept = {name: dict(found[0]._tilings) for name, found in self.linears.items()}
        self.linears["head"][0]._workspace.reserve(2**25)

    @torch.inference_mode()
    def step(self, size: int, length: int) -> float:
        """Microseconds of a replay with every request at one length."""
        inputs, pages = self.runner._inputs_on_device, -(-length // 16)
        inputs.send([_row(slot, length, pages) for slot in range(size)], size)
        self.runner._decode(size)
        graphs = Graphs(self.runner._decode, [size], torch.cuda.graph_pool_handle())
        graphs.capture_next()
        return timed(lambda: graphs.replay(size), 30)

    def show(self, note: str, sizes: tuple[int, ...], length: int = 260) -> None:
        try:
            cells = [f"{size}: {self.step(size, length):7.1f}" for size in sizes]
        except Exception as error:  # a tiling that the chip has no room for
            cells = [type(error).__name__]
        print(f"{note:64} {length:5}  " + "  ".join(cells), flush=True)

    def tile(self, name: str, rows: int, tiling: Tiling | None) -> None:
        for linear in self.linears[name]:
            linear._tilings[rows] = tiling

    def products(self) -> None:
        for name, rows, choices in TILINGS:
            for tiling in choices:
                self.tile(name, rows, tiling)
                self.show(f"{name} {tiling}", (1, 8) if rows == 16 else (64,))
            self.tile(name, rows, self.kept[name][rows])

    def attention(self) -> None:
        backend = self.runner.backend
        usual = backend._decode, backend._wanted
        for tiles in (Tiles(128, 4, 3), Tiles(64, 4, 2), Tiles(128, 4, 2)):
            for wanted in (33, 66, 132):
                backend._decode, backend._wanted = tiles, wanted
                self.show(f"attention {tiles} {wanted}", (1, 64), 300)
                self.show(f"attention {tiles} {wanted}", (1, 64), 8300)
        backend._decode, backend._wanted = usual

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


def _row(slot: int, length: int, pages: int) -> RowInput:
    known = np.arange(slot * pages, (slot + 1) * pages, dtype=np.int32)
    return RowInput(slot=slot, start=length - 1, count=1, first_page=0, new_pages=known, ids=None, sampling=GREEDY)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--profile", action="store_true")
    given = arguments.parse_args()
    print(versions())
    torch.cuda.set_stream(torch.cuda.Stream())
    variants = Variants()
    if given.profile:
        for batch, length, out in ((1, 128, 64), (64, 128, 64), (256, 128, 64), (1, 8192, 1)):
            variants.profile(batch, length, out)
    else:
        variants.show("as it is", (1, 8, 16, 32, 64, 256))
        for module in (ops, attention, narrow):
            module.EARLY = False  # type: ignore[attr-defined]
        variants.show("no early launches", (1, 8, 64, 256))
        for module in (ops, attention, narrow):
            module.EARLY = True  # type: ignore[attr-defined]
        variants.products()
        variants.attention()
    variants.llm.close()


if __name__ == "__main__":
    main()
