"""The Triton attention kernels alone: decodes as a share of the read limit, prefills in floating-point operations.

python benchmarks/gpu/attention.py [--tune]
"""

from __future__ import annotations

import argparse
import sys
from itertools import accumulate, cycle, product
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parent))
from limits import graphed, timed, versions

from engine.device import detect
from engine.plugin import KVKind
from engine.plugins.attention.triton import backend as triton_backend
from engine.plugins.attention.triton.backend import Tiles, TritonAttention
from engine.specs.attention import AttentionBatch, AttentionShape

READ = 4.69e12


def shape(heads: int, kv_heads: int) -> AttentionShape:
    return AttentionShape(
        kind=KVKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        v_head_dim=128,
        scale=128**-0.5,
        windows=(None,),
        softcap=None,
        dtype="bfloat16",
    )


def batch(counts: list[int], lengths: list[int], page: int, first: int = 0) -> AttentionBatch:
    """Requests over random pages, from page `first` on."""
    used = [-(-length // page) for length in lengths]
    order = torch.randperm(sum(used), generator=torch.Generator().manual_seed(0)) + first
    tables = torch.zeros(len(counts), max(used), dtype=torch.int32)
    for row, (at, pages) in enumerate(zip([0, *accumulate(used)], used, strict=False)):
        tables[row, :pages] = order[at : at + pages].int()
    positions = torch.cat([torch.arange(n - c, n) for c, n in zip(counts, lengths, strict=True)])
    owner = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    slots = tables[owner, positions // page].long() * page + positions % page
    return AttentionBatch(
        query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device="cuda"),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
        block_tables=tables.cuda(),
        slot_mapping=slots.cuda(),
        positions=positions.cuda(),
        num_decodes=sum(count == 1 for count in counts),
        query_lens_host=np.array(counts, dtype=np.int32),
        seq_lens_host=np.array(lengths, dtype=np.int32),
    )


def decode(backend: TritonAttention, requests: int, length: int, page: int) -> float:
    """Microseconds of one layer's decode, over enough sets of pages that the L2 helps none."""
    s = backend._shape
    width = s.kv_heads * s.head_dim * 2
    sets = max(1, int(1.2e9 // (requests * length * width * 2)) + 1)
    pages = requests * -(-length // page)
    kv = tuple(
        torch.randn(sets * pages, s.kv_heads, page, s.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2)
    )
    plans = [backend.plan(batch([1] * requests, [length] * requests, page, i * pages)) for i in range(sets)]
    qkv = torch.randn(requests, s.heads + 2 * s.kv_heads, s.head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split_with_sizes((s.heads, s.kv_heads, s.kv_heads), dim=1)
    turn = cycle(plans)
    return graphed(lambda: backend.forward(0, q, k, v, kv, next(turn)), max(8, sets))


def prefill(backend: TritonAttention, count: int, past: int, page: int) -> float:
    """Microseconds of one layer's prefill of one request."""
    s = backend._shape
    pages = -(-(count + past) // page)
    kv = tuple(torch.randn(pages, s.kv_heads, page, s.head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    plan = backend.plan(batch([count], [count + past], page))
    qkv = torch.randn(count, s.heads + 2 * s.kv_heads, s.head_dim, device="cuda", dtype=torch.bfloat16)
    q, k, v = qkv.split_with_sizes((s.heads, s.kv_heads, s.kv_heads), dim=1)
    return timed(lambda: backend.forward(0, q, k, v, kv, plan), 10)


def show_decode(backend: TritonAttention, note: Any = "") -> None:
    s, cells = backend._shape, []
    for requests, length in ((1, 32768), (64, 4096), (256, 2048), (1, 300), (64, 300)):
        took = decode(backend, requests, length, 16)
        moved = requests * length * s.kv_heads * s.head_dim * 4
        cells.append(f"{requests}x{length} {took:6.1f} µs {moved / took * 1e6 / READ:4.2f}")
    print(f"decode {s.heads}/{s.kv_heads}  " + " | ".join(cells), note, flush=True)


def show_prefill(backend: TritonAttention, note: Any = "") -> None:
    s, cells = backend._shape, []
    for count, past in ((8192, 0), (4096, 0), (2048, 6144), (128, 0), (16, 4080)):
        took = prefill(backend, count, past, 16)
        work = 4 * s.heads * s.head_dim * count * (past + count / 2)
        cells.append(f"{count}+{past} {took:7.1f} µs {work / took / 1e6:4.0f} TF")
    print(f"prefill {s.heads}/{s.kv_heads}  " + " | ".join(cells), note, flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--tune", action="store_true", help="try other tiles and numbers of parts")
    given = arguments.parse_args()
    print(versions())
    device = detect("cuda")
    for heads in ((32, 8), (28, 4)):
        made = TritonAttention(shape(*heads), 16, device)
        show_decode(made)
        show_prefill(made)
    if not given.tune:
        return
    tilings = [Tiles(128, 4, 5), Tiles(64, 4, 5), Tiles(64, 4, 7), Tiles(32, 4, 7)]
    for heads, programs, tiles in product(((32, 8), (28, 4)), (2, 1), tilings):
        triton_backend.PROGRAMS = programs  # type: ignore[misc]
        made = TritonAttention(shape(*heads), 16, device)
        made._decode = tiles
        show_decode(made, (tiles, programs))
    triton_backend.PROGRAMS = 2  # type: ignore[misc]
    for block, warps, stages, rows in ((64, 8, 3, 128), (128, 8, 3, 128)):
        made = TritonAttention(shape(28, 4), 16, device)
        made._long, made._fresh = Tiles(block, warps, stages, rows), None
        show_prefill(made, made._long)


if __name__ == "__main__":
    main()
