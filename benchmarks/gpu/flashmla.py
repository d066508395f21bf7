"""The Hopper decode kernels alone: checked against float64 on ragged lengths and poisoned pages, then timed.

python benchmarks/gpu/flashmla.py check|time|unmerged [--variants a,b] [--cases HEADSxBATCHxKV,…]

`unmerged` times without the kernel that merges partial results.

Every variant runs in a process of its own, so that one that hangs or crashes costs the others nothing. Method of the
times: one CUDA graph of calls that rotate over disjoint sets of random pages, 1.2 GB or more in all; median of 20
replays, twice, the better of the two.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import statistics
import sys
import time
import traceback
from functools import partial
from itertools import cycle
from typing import Any

import torch

from engine.latent.rows import PackedRows
from engine.plugin import KVKind
from engine.plugins.attention.flashmla.launch import Decode
from engine.specs.attention import AttentionShape

VARIANTS: dict[str, dict[str, Any]] = {"wide": {}, "few": {}, "packed": {"packed": True}}
HEADS = {"wide": [128, 100], "few": [16, 7], "packed": [16, 7, 40]}  # to check
SCALE = 0.1352337747812271
SHAPE = AttentionShape(
    kind=KVKind.MLA,
    heads=16,
    kv_heads=1,
    head_dim=576,
    v_head_dim=512,
    scale=SCALE,
    windows=(None,),
    softcap=None,
    dtype="bfloat16",
    packed=True,
)
ROWS = PackedRows(SHAPE)
CASES = [(128, 1, 32768), (128, 32, 4096), (128, 64, 8192), (128, 128, 16384)]
CASES += [(16, 1, 32768), (16, 32, 4096), (16, 64, 8192), (16, 128, 16384)]


def tables(lengths: list[int], pages: int, seed: int) -> torch.Tensor:
    """Random pages of a pool for requests of these lengths; rows padded with page 0."""
    used = [-(-length // 64) for length in lengths]
    order = torch.randperm(pages, generator=torch.Generator().manual_seed(seed))[: sum(used)].int()
    table = torch.zeros(len(lengths), max(used), dtype=torch.int32)
    at = 0
    for row, count in enumerate(used):
        table[row, :count] = order[at : at + count]
        at += count
    return table.cuda()


def pack(latent: torch.Tensor) -> torch.Tensor:
    """In pieces, since packing goes through float32."""
    return torch.cat([ROWS.pack(piece) for piece in latent.split(4096)])


def check(heads: int, lengths: list[int], variant: dict[str, Any], seed: int) -> tuple[float, bool]:
    """Largest relative error over requests against float64, and whether a second run gave the same bits."""
    torch.manual_seed(seed)
    pages = sum(-(-length // 64) for length in lengths) + 3
    latent = torch.randn(pages, 64, 576, device="cuda", dtype=torch.bfloat16)
    q = torch.randn(len(lengths), heads, 576, device="cuda", dtype=torch.bfloat16) * 0.4
    table = tables(lengths, pages, seed)
    written = torch.zeros(pages * 64, dtype=torch.bool, device="cuda")
    for row, length in enumerate(lengths):
        n = torch.arange(length, device="cuda")
        written[table[row, n // 64].long() * 64 + n % 64] = True
    if variant.get("packed"):
        stored = pack(latent)
        latent = ROWS.unpack(stored)
        stored[~written.view(pages, 64)] = 255
    else:
        latent.view(-1, 576)[~written] = float("nan")
        stored = latent
    decode = Decode(heads, SCALE, torch.device("cuda"), **variant)
    decode._partial.fill_(float("nan"))
    plan = decode.plan(torch.tensor(lengths, dtype=torch.int32, device="cuda"), table)
    out = decode(q, stored, plan)
    again = decode(q, stored, plan)
    worst = 0.0
    for row, length in enumerate(lengths):
        k = latent[table[row, : -(-length // 64)].long()].view(-1, 576)[:length].double()
        weights = torch.softmax(q[row].double() @ k.T * SCALE, -1)
        wanted = weights @ k[:, :512]
        error = ((out[row].double() - wanted).norm() / wanted.norm()).item()
        worst = max(worst, error if error == error else float("inf"))
    return worst, torch.equal(out, again)


def checks(name: str, variant: dict[str, Any]) -> None:
    rng = random.Random(0)
    heads = HEADS[name]
    shapes = [[64], [2, 63, 700, 4097], [20000], [1, 31, 33, 64, 65, 128] * 3, [8192] * 5]
    shapes += [[rng.randint(1, 20000) for _ in range(rng.choice([3, 17, 40]))] for _ in range(2)]
    shapes += [[rng.randint(1, 3000) for _ in range(256)]]
    for h in heads:
        for i, lengths in enumerate(shapes if h == heads[0] else shapes[1:6]):
            begin = time.time()
            error, same = check(h, lengths, variant, i)
            verdict = "ok" if error <= 3e-3 and same else "WRONG"
            text = f"{len(lengths)} of {min(lengths)}..{max(lengths)}"
            print(f"check {name} heads {h}: {text}: error {error:.5f} same {same} {verdict} {time.time() - begin:.1f}s")


def timed(run: Any, calls: int) -> float:
    """Microseconds a call."""
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(calls):
                run()
    best = float("inf")
    for _ in range(2):
        spans = []
        for i in range(23):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            spans += [begin.elapsed_time(end) * 1e3 / calls] if i > 2 else []
        best = min(best, statistics.median(spans))
    return best


def measure(what: str, name: str, variant: dict[str, Any], heads: int, requests: int, length: int) -> None:
    pages, packed = requests * length // 64, variant.get("packed")
    size = pages * 64 * (656 if packed else 1152)
    sets = max(1, -(-1_200_000_000 // size))
    latent = torch.empty(sets * pages, 64, 576, device="cuda", dtype=torch.bfloat16).normal_()
    latent = pack(latent) if packed else latent
    q = torch.randn(requests, heads, 576, device="cuda", dtype=torch.bfloat16) * 0.4
    decode = Decode(heads, SCALE, torch.device("cuda"), **variant)
    if what == "unmerged":
        decode._merge = None
    order = torch.randperm(sets * pages, device="cuda").int().view(sets, requests, -1)
    lens = torch.full((requests,), length, dtype=torch.int32, device="cuda")
    turn = cycle([decode.plan(lens, order[i]) for i in range(sets)])
    took = timed(lambda: decode(q, latent, next(turn)), max(sets, 8))
    moved = size + requests * heads * (576 + 512) * 2
    work = 2 * heads * requests * length * (576 + 512)
    rates = f"{moved / took / 1e3:6.0f} GB/s {work / took / 1e6:5.0f} TFLOP/s"
    print(f"{what} {name:8} {heads:3} heads {requests:3} x {length:5}: {took:8.1f} us {rates}", flush=True)


def run(what: str, name: str, variant: dict[str, Any], cases: list[tuple[int, int, int]]) -> None:
    if what == "check":
        checks(name, variant)
        return
    for case in cases:
        measure(what, name, dict(variant), *case)


def apart(job: Any, seconds: float) -> None:
    """Run in a child process with a time limit."""
    child = os.fork()
    if child == 0:
        try:
            job()
            os._exit(0)
        except BaseException:
            traceback.print_exc(limit=4)
            sys.stderr.flush()
            os._exit(1)
        finally:
            sys.stdout.flush()
    end = time.time() + seconds
    while time.time() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            print(f"ended with {status}" if status else "done", flush=True)
            return
        time.sleep(0.05)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    print(f"stopped after {seconds} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["check", "time", "unmerged"])
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--cases", default="")
    parser.add_argument("--limit", type=float, default=30.0)
    args = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    cases = [tuple(map(int, case.split("x"))) for case in args.cases.split(",") if case] or CASES
    for name in args.variants.split(","):
        variant = VARIANTS[name]
        fitting = [case for case in cases if (case[0] > 16) == (name == "wide")]
        print(f"-- {name} {variant}")
        apart(partial(run, args.what, name, variant, fitting), args.limit)


if __name__ == "__main__":
    main()
