"""The operations by the compiled CPU kernels, and the typed door to the kernels for plugins.

Import this only where `engine.ops.kernels.missing` finds nothing missing. torch comes before the extension so that both
share one OpenMP runtime: two pools spinning on the same cores would ruin each other. Every kernel computes a row in the
same way whatever other rows are in the batch.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.ops import _native
from engine.ops.reference import TorchOps

PANEL_ROWS: Final = 32
"""Rows of a packed weight that lie interleaved; it is padded to a multiple of them."""

_STREAMED_ROWS: Final = 6

ATTENTION_SEGMENT: Final = _native.ATTENTION_SEGMENT
"""Keys of one segment: the grain at which a query's keys can be spread over threads."""


class NativeOps(TorchOps):
    """bfloat16 and float32 on the CPU, rounded as in `TorchOps`, one pass over memory each; experts as there."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or torch.get_num_threads()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return self._norm(x, weight, eps, 0)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        assert residual.is_contiguous(), "the residual must be contiguous"
        if x.dim() > residual.dim():
            return super().add_rms_norm(x, residual, weight, eps)
        return self._norm(x, weight, eps, residual.data_ptr())

    def _norm(self, x: Tensor, weight: Tensor, eps: float, residual: int) -> Tensor:
        shape, strides = x.shape, x.stride()
        y = torch.empty(shape, dtype=x.dtype)
        inner, inner_stride = (1, 0) if len(shape) == 2 else (shape[1], strides[1])
        _native.rms_norm(
            x.data_ptr(),
            shape[0],
            inner,
            strides[0],
            inner_stride,
            shape[-1],
            weight.data_ptr(),
            residual,
            y.data_ptr(),
            x.dtype is torch.bfloat16,
            self._threads,
            eps,
        )
        return y

    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        tokens, heads, _ = q.shape
        _native.rope(
            q.data_ptr(),
            heads,
            q.stride(0),
            q.stride(1),
            k.data_ptr(),
            k.shape[1],
            k.stride(0),
            k.stride(1),
            positions.data_ptr(),
            cos_sin.data_ptr(),
            tokens,
            cos_sin.shape[1],
            q.dtype is torch.bfloat16,
            self._threads,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        tokens, width = gate_up.shape
        y = torch.empty(tokens, width // 2, dtype=gate_up.dtype)
        _native.silu_mul(
            gate_up.data_ptr(),
            gate_up.stride(0),
            y.data_ptr(),
            tokens,
            width // 2,
            gate_up.dtype is torch.bfloat16,
            self._threads,
        )
        return y


def pack_rows(weight: Tensor, packed: Tensor, first_row: int, threads: int) -> None:
    """Put `weight`, bfloat16 [rows, k] with k even, into a packed weight as rows `first_row, first_row + 1, …`.

    packed: contiguous bfloat16 [panels, k / 2, PANEL_ROWS, 2].
    """
    weight = weight.contiguous()
    _native.pack_rows(weight.data_ptr(), weight.shape[0], weight.shape[1], packed.data_ptr(), first_row, threads)


def can_gate(rows: int, out_features: int) -> bool:
    """Whether a product with so many rows gates its result in the same pass; one of few rows only reads the weight."""
    return rows > _STREAMED_ROWS and out_features % (2 * PANEL_ROWS) == 0


def linear(
    x: Tensor, packed: int, bias: int, out_features: int, out_dtype: torch.dtype, threads: int, *, gated: bool = False
) -> Tensor:
    """x W^T + b, summed in float32 in the order of k: bfloat16 [T, k] with a dense last axis -> [T, out_features].

    `packed` and `bias` are the addresses of a weight made with `pack_rows` and of a float32 vector (0: none);
    `out_dtype` is bfloat16 or float32. With `gated`, where it can be, silu of the first half times the second, in
    bfloat16: [T, out_features / 2].
    """
    rows, k = x.shape
    y = torch.empty(rows, out_features // 2 if gated else out_features, dtype=out_dtype)
    _native.linear(
        x.data_ptr(),
        x.stride(0),
        packed,
        bias,
        y.data_ptr(),
        rows,
        out_features,
        k,
        out_dtype is torch.float32,
        gated,
        threads,
    )
    return y


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantWeight:
    """A weight in panels of blocks, which `quant_linear` multiplies; `native_kernels.h` has the layout."""

    packed: Tensor  # uint8 [panels, k / 32, bytes of a block of PANEL_ROWS rows]
    bias: Tensor | None  # float32 [out_features]
    out_features: int
    in_features: int
    bits: int  # 4 or 8
    offsets: bool  # there always with 4 bits


def quant_linear(
    x: Tensor, weight: QuantWeight, out_dtype: torch.dtype, threads: int, *, gated: bool = False
) -> Tensor:
    """x W^T + b for bfloat16 or float32 [T, k] with a dense last axis -> [T, out_features] of one of the two.

    Inputs are rounded to 8 bits in blocks of 32 with a scale each. A block's sum is exact, blocks are added up in
    float32 in the order of k. `gated` is as for `linear`.
    """
    rows, k = x.shape
    y = torch.empty(rows, weight.out_features // 2 if gated else weight.out_features, dtype=out_dtype)
    rounded = torch.empty(rows * k // 32 * _native.QUANT_INPUT_BYTES, dtype=torch.uint8)
    _native.quant_linear(
        x.data_ptr(),
        x.stride(0),
        weight.packed.data_ptr(),
        0 if weight.bias is None else weight.bias.data_ptr(),
        y.data_ptr(),
        rounded.data_ptr(),
        rows,
        weight.out_features,
        k,
        weight.bits,
        weight.offsets,
        x.dtype is torch.bfloat16,
        out_dtype is torch.bfloat16,
        gated,
        threads,
    )
    return y


def peaks(x: Tensor, threads: int) -> tuple[list[int], list[bool]]:
    """Per row of float32 [rows, width]: the first place of its largest number, and whether all are finite."""
    x = x.contiguous()
    rows, width = x.shape
    places, finite = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, dtype=torch.bool)
    _native.peaks(x.data_ptr(), rows, width, places.data_ptr(), finite.data_ptr(), threads)
    return places.tolist(), finite.tolist()


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionWork:
    """One step's attention for the kernel; all layers share it. Tensors are int32 and contiguous unless said otherwise.

    An item is one tile of queries of one request against some segments of its keys; a merge joins the partial results
    of a tile that was split into one item per segment. See `native_kernels.h`, whose record `pack` fills.
    """

    tokens: int
    requests: int
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    page_size: int
    dtype: torch.dtype
    threads: int
    scale: float
    softcap: float | None
    query_start: Tensor
    seq_lens: Tensor
    block_tables: Tensor
    slot_mapping: Tensor  # int64
    positions: Tensor  # int64
    trees: Tensor | None  # int64 [R, 2]: addresses of dense bool [q, m], 0 where there is none, and m
    stores: Tensor  # [n]: tokens whose KV must be stored before any item runs
    items: Tensor  # [n, 7]: request, first query, queries, first segment, segments, partial or -1, stores its own KV
    merges: Tensor  # [n, 5]: request, first query, queries, first partial, partials
    scratch: Tensor  # float32 [threads, floats]
    partials: Tensor  # float32 [partials * kv_heads, floats]

    def pack(self) -> bytes:
        """The record that `attention` takes; valid while this object and its tensors live."""
        whole = (self.tokens, self.requests, self.heads, self.kv_heads, self.head_dim, self.v_head_dim, self.page_size)
        return struct.pack(
            "26q2d",
            *whole,
            self.dtype is torch.bfloat16,
            self.threads,
            self.query_start.data_ptr(),
            self.seq_lens.data_ptr(),
            self.block_tables.data_ptr(),
            self.block_tables.stride(0),
            self.slot_mapping.data_ptr(),
            self.positions.data_ptr(),
            0 if self.trees is None else self.trees.data_ptr(),
            self.stores.data_ptr(),
            self.items.data_ptr(),
            self.merges.data_ptr(),
            len(self.stores),
            len(self.items),
            len(self.merges),
            self.scratch.data_ptr(),
            self.scratch.shape[1],
            self.partials.data_ptr(),
            self.partials.shape[1],
            self.scale,
            self.softcap or 0.0,
        )


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One step, as the kernel takes it.

    A backend whose plans are of this class lets whole steps be recorded and replayed (see `engine.ops.tape`): its
    `forward` calls `attention` once and no other kernel, with the same arguments whatever the plan says.
    """

    record: bytes
    work: AttentionWork  # keeps alive what the record points to
    trees: tuple[Tensor, ...] = ()


def attention(plan: bytes, q: Tensor, k: Tensor, v: Tensor, kv: tuple[Tensor, ...], window: int, out: Tensor) -> None:
    """Store k and v in their pages, then attend: arguments as in `AttentionBackend.forward`, `window` 0 for none."""
    q_token, q_head, _ = q.stride()
    k_token, k_head, _ = k.stride()
    v_token, v_head, _ = v.stride()
    k_pages, v_pages = kv
    _native.attention(
        plan,
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        q_token,
        q_head,
        k_token,
        k_head,
        v_token,
        v_head,
        k_pages.data_ptr(),
        v_pages.data_ptr(),
        k_pages.stride(0),
        v_pages.stride(0),
        out.data_ptr(),
        window,
    )


__all__ = [
    "ATTENTION_SEGMENT",
    "PANEL_ROWS",
    "AttentionPlan",
    "AttentionWork",
    "NativeOps",
    "QuantWeight",
    "attention",
    "can_gate",
    "linear",
    "pack_rows",
    "peaks",
    "quant_linear",
]
