"""What the card gives: bytes a second when a kernel only reads, and bf16 products a second.

python benchmarks/gpu/limits.py
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl


@triton.jit
def _read(x, out, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK * ROUNDS + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(ROUNDS):
        total += tl.load(x + at + i * BLOCK)
    if tl.sum(total, 0) == 12345.678:  # never: keeps the loads
        tl.store(out, 1.0)


def timed(run: Callable[[], object], repeats: int = 20) -> float:
    """Median microseconds of one call, by events around each."""
    for _ in range(3):
        run()
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in pairs:
        before.record()
        run()
        after.record()
    torch.cuda.synchronize()
    return sorted(before.elapsed_time(after) for before, after in pairs)[repeats // 2] * 1e3


def graphed(run: Callable[[], object], inner: int = 1) -> float:
    """Median microseconds of one call inside a replayed graph of `inner` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(inner):
                run()
        return timed(graph.replay) / inner


def read_limit() -> float:
    """Bytes a second of a kernel that only reads 8 GiB."""
    x = torch.zeros(2**31, dtype=torch.float32, device="cuda")
    out = torch.zeros(1, device="cuda")
    best = min(
        timed(lambda b=block, r=rounds: _read[(x.numel() // (b * r),)](x, out, BLOCK=b, ROUNDS=r, num_warps=8))
        for block, rounds in ((4096, 4), (8192, 2), (4096, 8))
    )
    return x.nbytes / best * 1e6


def product_limit() -> float:
    """Floating-point operations a second of a bf16 product of 8192³."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / timed(lambda: a @ b) * 1e6


def versions() -> str:
    """What everything here was measured with."""
    return (
        f"{torch.cuda.get_device_name()}, python {sys.version.split()[0]}, torch {torch.__version__}, "
        f"triton {triton.__version__}"
    )


if __name__ == "__main__":
    print(versions())
    print(f"read only  {read_limit() / 1e12:6.2f} TB/s")
    print(f"bf16 8192³ {product_limit() / 1e12:6.0f} TFLOP/s")
