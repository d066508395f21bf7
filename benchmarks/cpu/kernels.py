"""The compiled CPU kernels beside torch's, in turn in one process: `python benchmarks/cpu/kernels.py [--rounds 5]`.

Sizes are those of SmolLM2-135M. Each figure is the best of the rounds, which take turns, so that both sides see the
same machine; the last column is torch's time over ours. Weights are spread over more memory than the caches hold.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.device import detect
from engine.ops.kernels import missing
from engine.ops.native import NativeOps
from engine.ops.reference import TorchOps
from engine.plugin import KVKind
from engine.plugins.attention.cpu.backend import CpuAttention
from engine.plugins.quantization.packed.linear import PackedQuantization
from engine.specs.attention import AttentionBatch, AttentionShape

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 576, 1536, 9, 3, 64, 49152, 30
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM
SIZES = [(QKV, HIDDEN), (HEADS * HEAD_DIM, HIDDEN), (2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)]
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel at one size; `work` counts what `unit` names (1e9 of it a second)."""

    name: str
    ours: Callable[[], object]
    torchs: Callable[[], object]
    work: float
    unit: str


def noise(*shape: int) -> Tensor:
    """bfloat16 values."""
    return torch.randn(*shape).bfloat16()


def products() -> Iterator[Case]:
    """All matrix products of one step, or those of four layers where there are many rows."""
    packing = PackedQuantization()
    weights = [noise(*size) for _ in range(LAYERS) for size in SIZES] + [noise(VOCAB, HIDDEN)]
    packed = [packing.head(weight) for weight in weights]
    for rows in (1, 4, 16, 64, 512, 2048):
        count = len(weights) if rows <= 64 else 4 * len(SIZES)
        inputs = {k: noise(rows, k) for k in (HIDDEN, INTERMEDIATE)}

        def ours(inputs: dict[int, Tensor] = inputs, count: int = count) -> None:
            for layer in packed[:count]:
                layer(inputs[layer.in_features])

        def dense(inputs: dict[int, Tensor] = inputs, count: int = count) -> None:
            for weight in weights[:count]:
                functional.linear(inputs[weight.shape[1]], weight)

        elements = sum(weight.numel() for weight in weights[:count])
        if rows <= 4:
            yield Case(f"{count} products, {rows} rows", ours, dense, 2 * elements, "GB/s")
        else:
            yield Case(f"{count} products, {rows} rows", ours, dense, 2 * elements * rows, "GFLOP/s")


def small_operations() -> Iterator[Case]:
    """Norms, rotary embedding and gated activation."""
    native, plain = NativeOps(), TorchOps()
    weight, table = noise(HIDDEN), torch.randn(4096, HEAD_DIM)
    for rows in (1, 64, 512):
        x, residual, gate_up = noise(rows, HIDDEN), noise(rows, HIDDEN), noise(rows, 2 * INTERMEDIATE)
        qkv, positions = noise(rows, HEADS + 2 * KV_HEADS, HEAD_DIM), torch.arange(rows)
        q, k, _ = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        norm, turn, gate = (
            [lambda o=o, a=(x, residual, weight, 1e-5): o.add_rms_norm(*a) for o in (native, plain)],
            [lambda o=o, a=(q, k, positions, table): o.rope(*a) for o in (native, plain)],
            [lambda o=o, a=gate_up: o.silu_mul(a) for o in (native, plain)],
        )
        yield Case(f"add_rms_norm, {rows} rows", *norm, 8 * x.numel(), "GB/s")
        yield Case(f"rope, {rows} rows", *turn, 4 * rows * (HEADS + KV_HEADS) * HEAD_DIM, "GB/s")
        yield Case(f"silu_mul, {rows} rows", *gate, 3 * gate_up.numel(), "GB/s")


def attention() -> Iterator[Case]:
    """Decodes over paged KV, and whole prompts; torch reads dense KV of equal lengths, without pages to look up."""
    for requests, queries, keys in (
        (1, 1, 150),
        (1, 1, 4000),
        (64, 1, 160),
        (1, 512, 512),
        (1, 2048, 2048),
        (8, 5, 300),
    ):
        backend, batch = CpuAttention(shape(), PAGE_SIZE), ragged(requests, queries, keys)
        pages = int(batch.block_tables.max()) + 1
        kv = tuple(torch.zeros(pages, *part, dtype=torch.bfloat16) for _, part in backend.kv_layout().parts)
        qkv = noise(requests * queries, HEADS + 2 * KV_HEADS, HEAD_DIM)
        q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        plan = backend.plan(batch)
        dense_q = noise(requests, HEADS, queries, HEAD_DIM)
        dense_k, dense_v = noise(requests, KV_HEADS, keys, HEAD_DIM), noise(requests, KV_HEADS, keys, HEAD_DIM)
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries) if 1 < queries < keys else None

        def ours(backend: CpuAttention = backend, args: tuple = (0, q, k, v, kv, plan)) -> None:
            backend.forward(*args)

        def dense(qkv: tuple = (dense_q, dense_k, dense_v), mask: Tensor | None = mask) -> None:
            causal = mask is None and qkv[0].shape[2] > 1
            functional.scaled_dot_product_attention(*qkv, mask, is_causal=causal, enable_gqa=True)

        seen = requests * (queries * (keys - queries) + queries * (queries + 1) / 2)
        name = f"attention, {requests} x {queries} queries, {keys} keys"
        if queries == 1:
            yield Case(name, ours, dense, 4 * requests * keys * KV_HEADS * HEAD_DIM, "GB/s")
        else:
            yield Case(name, ours, dense, 4 * seen * HEADS * HEAD_DIM, "GFLOP/s")


def shape() -> AttentionShape:
    """Attention of the model."""
    return AttentionShape(
        kind=KVKind.GQA,
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scale=HEAD_DIM**-0.5,
        windows=(None,),
        softcap=None,
        dtype="bfloat16",
    )


def ragged(requests: int, queries: int, keys: int) -> AttentionBatch:
    """Equal requests whose pages lie anywhere."""
    per_request = -(-keys // PAGE_SIZE)
    tables = np.random.default_rng(0).permutation(requests * per_request).reshape(requests, -1).astype(np.int32)
    positions = np.arange(keys - queries, keys)
    slots = tables[:, positions // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + positions % PAGE_SIZE
    lengths = np.full(requests, keys, np.int32)
    return AttentionBatch(
        query_start=torch.arange(0, requests * queries + 1, queries, dtype=torch.int32),
        seq_lens=torch.from_numpy(lengths),
        block_tables=torch.from_numpy(tables),
        slot_mapping=torch.from_numpy(slots.reshape(-1)),
        positions=torch.from_numpy(np.tile(positions, requests)),
        num_decodes=requests if queries == 1 else 0,
        query_lens_host=np.full(requests, queries, np.int32),
        seq_lens_host=lengths,
    )


def seconds(call: Callable[[], object], budget: float) -> float:
    """Time of one call: the mean of as many as fit into the budget, at least one."""
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < budget:
        call()
        calls += 1
    return (time.perf_counter() - began) / calls


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns per kernel, the best of which counts")
    rounds = parser.parse_args().rounds
    device = detect("cpu")
    if reason := missing(device):
        parser.error(reason)
    print(f"{date.today()} · {device.name} · {torch.get_num_threads()} threads · torch {torch.__version__} · ", end="")
    print(f"Python {platform.python_version()} · best of {rounds} rounds in turn\n")
    print(f"{'kernel':<42}{'ours µs':>10}{'torch µs':>10}{'ours':>9}{'torch':>9}  {'unit':<8}{'ratio':>6}")
    for cases in (products, small_operations, attention):
        for case in cases():
            times = [(seconds(case.ours, 0.02), seconds(case.torchs, 0.02)) for _ in range(rounds + 1)][1:]
            ours, torchs = (min(column) for column in zip(*times, strict=True))
            rates = f"{case.work / ours / 1e9:>9.1f}{case.work / torchs / 1e9:>9.1f}  {case.unit:<8}"
            print(f"{case.name:<42}{ours * 1e6:>10.1f}{torchs * 1e6:>10.1f}{rates}{torchs / ours:>6.1f}", flush=True)


if __name__ == "__main__":
    main()
