"""Linear layers over packed weights. One copy of the weight serves one row at memory speed and many at full compute.

A result is summed in float32 in the order of k for any number of rows: it does not depend on the rest of the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.ops import Ops, native
from engine.ops.arena import Arena
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource


class PackedLinear(Linear):
    """y = x W^T + b; the sum is rounded once, after the bias was added, or not at all where y is float32."""

    def __init__(
        self, packed: Tensor, out_features: int, bias: Tensor | None, out_dtype: torch.dtype, threads: int
    ) -> None:
        """packed: see `native.pack_rows`; bias: float32 [out_features]."""
        self.out_features = out_features
        self.in_features = packed.shape[1] * 2
        self._packed = packed
        self._bias = bias
        self._addresses = packed.data_ptr(), 0 if bias is None else bias.data_ptr()
        self._out_dtype = out_dtype
        self._threads = threads

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self._addresses
        return native.linear(x, weight, bias, self.out_features, self._out_dtype, self._threads)

    def gated(self, x: Tensor, ops: Ops) -> Tensor:
        if self._out_dtype is not torch.bfloat16 or not native.can_gate(x.shape[0], self.out_features):
            return ops.silu_mul(self(x))
        weight, bias = self._addresses
        return native.linear(x, weight, bias, self.out_features, self._out_dtype, self._threads, gated=True)

    def weight_bytes(self) -> int:
        return self._packed.nbytes + (self._bias.nbytes if self._bias is not None else 0)


class PackedQuantization(Quantization):
    """Packs bfloat16 weights as they are read; no moment holds the checkpoint twice."""

    def __init__(self, threads: int | None = None) -> None:
        self._threads = threads or torch.get_num_threads()
        self._arena = Arena()

    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        """As the contract says.

        Raises:
            ValueError: the weights are of an odd width, which can't be packed in pairs.
        """
        shapes = [source.shape(name) for name in names]
        rows, k = sum(shape[0] for shape in shapes), shapes[0][1]
        if k % 2:
            raise ValueError(
                f"quantization 'packed' needs weights of an even width, but {names[0]} has {k}; use 'none'"
            )
        packed, row = self._empty(rows, k), 0
        for name, shape in zip(names, shapes, strict=True):
            native.pack_rows(source.get(name, torch.bfloat16), packed, row, self._threads)
            row += shape[0]
        added = torch.cat([source.get(name, torch.float32) for name in bias]) if bias else None
        return PackedLinear(packed, rows, added, torch.bfloat16, self._threads)

    def head(self, embedding: Tensor) -> Linear:
        """A packed copy, for looking up rows wants them whole. Its results are float32, never rounded to bfloat16."""
        packed = self._empty(*embedding.shape)
        native.pack_rows(embedding, packed, 0, self._threads)
        return PackedLinear(packed, embedding.shape[0], None, torch.float32, self._threads)

    def _empty(self, rows: int, k: int) -> Tensor:
        panels = -(-rows // native.PANEL_ROWS)
        shape = (panels, k // 2, native.PANEL_ROWS, 2)
        return self._arena.take(panels * native.PANEL_ROWS * k * 2).view(torch.bfloat16).view(shape)


__all__ = ["PackedLinear", "PackedQuantization"]
