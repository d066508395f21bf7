"""Latent attention on the card: every case of the table against the limits, correctness against float64, prefill.

python benchmarks/gpu/mla.py [--backend triton] [--check] [--prefill]

Times are medians of a CUDA graph whose calls rotate over disjoint sets of random pages of 64 tokens (1.2 GB and more),
planned outside of it as the engine plans once a step for all layers. The floor is the larger of bytes (rows once,
queries, outputs) over the read limit and operations over the limit of bf16 products.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
from attention import batch
from limits import graphed, timed, versions

from engine.device import detect
from engine.latent.backend import LatentBackend
from engine.latent.rows import PackedRows
from engine.latent.up import LatentUp
from engine.specs.attention import AttentionShape
from engine.testing.attention import mla
from engine.testing.attention_bench import Bench

READ: Final = 4.69e12
PRODUCTS: Final = 798e12
PAGE: Final = 64
CASES: Final = ((1, 32768), (32, 4096), (64, 8192), (128, 16384))

Make = Callable[[AttentionShape], LatentBackend]


def shape(heads: int, **changes: Any) -> AttentionShape:
    """DeepSeek's widths and V3's scale."""
    return replace(mla(heads, expanded=(192, 128), dtype="bfloat16"), scale=0.1352338, **changes)


def maker(name: str) -> Make:
    """Builds the backend of a built-in plugin."""
    (offer,) = import_module(f"engine.plugins.attention.{name}").attention_backends()
    device = detect("cuda")
    return lambda wanted: offer.build(offer.options(), shape=wanted, page_size=PAGE, device=device)


def pool(backend: LatentBackend, pages: int) -> Tensor:
    """A part filled with random rows."""
    layout = backend.kv_layout()
    size = (pages, *layout.parts[0][1])
    if layout.dtype != "uint8":
        return torch.randn(size, dtype=torch.bfloat16, device="cuda")
    part = torch.empty(size, dtype=torch.uint8, device="cuda")
    for some in part.split(4096):
        some.copy_(PackedRows(backend.shape).pack(torch.randn(len(some), PAGE, 1, 576, device="cuda").bfloat16()))
    return part


def decode(make: Make, heads: int, requests: int, length: int, packed: bool = False, tokens: int = 1) -> float:
    """Microseconds of one layer."""
    backend = make(shape(heads, packed=packed))
    row = 656 if packed else 1152
    sets = max(1, int(1.2e9 // (requests * length * row)) + 1)
    pages = requests * -(-length // PAGE)
    part = pool(backend, sets * pages)
    plans = [backend.plan(batch([tokens] * requests, [length] * requests, PAGE, i * pages)) for i in range(sets)]
    q = torch.randn(requests * tokens, heads, 576, device="cuda").bfloat16()
    k = torch.randn(requests * tokens, 1, 576, device="cuda").bfloat16()
    turn = cycle(plans)
    return graphed(lambda: backend.forward(0, q, k, None, (part,), next(turn)), max(8, sets))


def floor(heads: int, requests: int, length: int, packed: bool = False, tokens: int = 1) -> float:
    """Microseconds that the limits allow."""
    rows, queries = requests * length, requests * tokens * heads
    moved = rows * (656 if packed else 1152) + queries * (576 + 512) * 2
    return max(moved / READ, 2 * queries * length * (576 + 512) / PRODUCTS) * 1e6


def show_decodes(make: Make, heads: int, packed: bool = False, note: Any = "", tokens: int = 1) -> None:
    cells = []
    for requests, length in CASES:
        took = decode(make, heads, requests, length, packed, tokens)
        torch.cuda.empty_cache()
        moved = requests * length * (656 if packed else 1152) + requests * tokens * heads * 1088 * 2
        work = 2 * requests * tokens * heads * length * 1088
        least = floor(heads, requests, length, packed, tokens)
        cells.append(
            f"{requests}x{length} {took:7.1f} µs {moved / took / 1e3:5.0f} GB/s {work / took / 1e6:4.0f} TF "
            f"{least / took:4.2f}"
        )
    print(f"decode {heads:3} heads x{tokens} {'fp8 ' if packed else 'bf16'} " + " | ".join(cells), note, flush=True)


def check(make: Make, heads: int, requests: int, packed: bool, seed: int, tokens: int = 1) -> float:
    """Error of a batch with random lengths, relative to float64 over what the cache stands for; free slots are NaN."""
    lengths = torch.randint(tokens, 20_001, (requests,), generator=torch.Generator().manual_seed(seed)).tolist()
    backend = make(shape(heads, packed=packed))
    step = batch([tokens] * requests, lengths, PAGE)
    layout = backend.kv_layout()
    count = int(step.block_tables.max()) + 2
    size = (count, *layout.parts[0][1])
    if packed:
        part = torch.full(size, 255, dtype=torch.uint8, device="cuda")
    else:
        part = torch.full(size, torch.nan, dtype=torch.bfloat16, device="cuda")
    q = torch.randn(requests * tokens, heads, 576, device="cuda").bfloat16()
    k = torch.empty(requests * tokens, 1, 576, dtype=torch.bfloat16, device="cuda")
    want = torch.empty(*q.shape[:2], 512, dtype=torch.float64, device="cuda")
    for r, length in enumerate(lengths):
        rows = torch.randn(length, 1, 576, device="cuda").bfloat16()
        kept = PackedRows(backend.shape).unpack(PackedRows(backend.shape).pack(rows)) if packed else rows
        index = torch.arange(length - tokens, device="cuda")
        backend.rows.store(part, (step.block_tables[r, index // PAGE].long(), index % PAGE), rows[: length - tokens])
        mine = slice(r * tokens, (r + 1) * tokens)
        k[mine] = rows[length - tokens :]
        keys = kept[:, 0].double()
        scores = torch.einsum("nhd,ld->nhl", q[mine].double(), keys) * backend.shape.scale
        late = torch.arange(length, device="cuda") > torch.arange(length - tokens, length, device="cuda")[:, None]
        want[mine] = scores.masked_fill_(late[:, None], -torch.inf).softmax(-1) @ keys[:, :512]
    before = part.clone()
    got = backend.forward(0, q, k, None, (part,), backend.plan(step))
    again = backend.forward(0, q, k, None, (before,), backend.plan(step))
    assert torch.equal(got, again), "two runs differ"
    error = (got.double() - want).norm() / want.norm()
    worst = ((got.double() - want).flatten(1).norm(dim=1) / want.flatten(1).norm(dim=1)).max()
    print(
        f"check {heads:3} heads x{tokens} {'fp8 ' if packed else 'bf16'} batch {requests:3}: error {error:.5f}, "
        f"worst token {worst:.5f}, same bits twice",
        flush=True,
    )
    assert error < (1e-2 if packed else 3e-3), "outside of the limit"
    return float(error)


def check_expanded(make: Make, packed: bool) -> None:
    """Chunks worth expanding, behind a prefix and beside decodes, in one round and in several, against float64."""
    wanted = mla(16, expanded=(192, 128), dtype="bfloat16", packed=packed)
    for most in (128, 10**6):
        backend = make(wanted)
        backend._most = most
        bench = Bench(backend, wanted, PAGE, torch.device("cuda"), pages=32)
        for step in ({"a": 400, "b": 20}, {"a": 300, "b": 1, "c": 3}):
            got, want = bench.step(step)
            error = float((got.double() - want).norm() / want.norm())
            print(
                f"check expanded {'fp8 ' if packed else 'bf16'} {step}, rounds of {most}: error {error:.5f}", flush=True
            )
            assert error < 1e-2, "outside of the limit"


def checks(make: Make) -> None:
    """Batches of 1 to 256, both forms of rows, one token and several; then expanded chunks."""
    for packed in (False, True):
        check_expanded(make, packed)
    for heads in (128, 16):
        for packed in (False, True):
            for seed, requests in enumerate((1, 3, 37, 256)):
                check(make, heads, requests, packed, seed)
            check(make, heads, 9, packed, 7, tokens=3)


def prefill(make: Make, heads: int, count: int, past: int, packed: bool = False) -> float:
    """Microseconds of one layer's chunk behind a prefix, products with the up-projection included."""
    backend = make(shape(heads, packed=packed))
    part = pool(backend, -(-(count + past) // PAGE))
    up = LatentUp.of(torch.randn(heads, 256, 512, device="cuda").bfloat16() * 512**-0.5, 128)
    plan = backend.plan(batch([count], [count + past], PAGE))
    q = torch.randn(count, heads, 192, device="cuda").bfloat16()
    rows = torch.randn(count, 576, device="cuda").bfloat16()
    return timed(lambda: backend.forward_latent(0, q, rows, up, (part,), plan), 10)


def show_prefills(make: Make, heads: int, packed: bool = False) -> None:
    cells = []
    for count, past in ((4096, 0), (2048, 6144), (512, 16384), (128, 4096)):
        took = prefill(make, heads, count, past, packed)
        pairs = count * past + count * (count + 1) / 2
        cells.append(f"{count}+{past} {took:8.1f} µs {2 * heads * pairs * 320 / took / 1e6:4.0f} TF")
    print(f"prefill {heads:3} heads {'fp8 ' if packed else 'bf16'} " + " | ".join(cells), flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backend", default="triton", help="a built-in attention plugin that knows latent rows")
    arguments.add_argument("--heads", type=int, nargs="*", default=[128, 16])
    arguments.add_argument("--check", action="store_true", help="correctness alone")
    arguments.add_argument("--prefill", action="store_true", help="prefill alone")
    given = arguments.parse_args()
    print(versions(), given.backend)
    make = maker(given.backend)
    if given.check:
        checks(make)
        return
    for heads in given.heads:
        for packed in (False, True):
            if not given.prefill:
                show_decodes(make, heads, packed)
            show_prefills(make, heads, packed)


if __name__ == "__main__":
    main()
