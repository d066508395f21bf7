"""Linear layers by the compiled integer kernel. Imported only where it runs."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from engine.ops import Ops
from engine.ops.arena import Arena
from engine.ops.native import QuantWeight, can_gate, quant_linear
from engine.plugins.quantization.blocks.panels import pack
from engine.specs.quantization import Linear
from engine.specs.weight_loader import Blocks


class BlockLinear(Linear):
    """y = x W^T + b with inputs rounded to 8 bits. A row's result does not depend on the rest of the batch."""

    def __init__(self, weight: QuantWeight, unrounded: bool, threads: int) -> None:
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self._weight, self._threads = weight, threads
        self._unrounded = unrounded

    def __call__(self, x: Tensor) -> Tensor:
        out_dtype = torch.float32 if self._unrounded else x.dtype
        return quant_linear(x, self._weight, out_dtype, self._threads)

    def gated(self, x: Tensor, ops: Ops) -> Tensor:
        if x.dtype is not torch.bfloat16 or self._unrounded or not can_gate(x.shape[0], self.out_features):
            return ops.silu_mul(self(x))
        return quant_linear(x, self._weight, torch.bfloat16, self._threads, gated=True)

    def weight_bytes(self) -> int:
        bias = self._weight.bias
        return self._weight.packed.nbytes + (0 if bias is None else bias.nbytes)


def make_layers(threads: int | None = None) -> Callable[[Blocks, Tensor | None, bool], BlockLinear]:
    """A maker of layers that lie one behind the other in memory."""
    arena, count = Arena(), threads or torch.get_num_threads()

    def make(blocks: Blocks, bias: Tensor | None, unrounded: bool) -> BlockLinear:
        return BlockLinear(pack(blocks, bias, arena), unrounded, count)

    return make


__all__ = ["BlockLinear", "make_layers"]
