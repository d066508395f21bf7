"""Dense linear layers on CUDA: our kernel for few rows, cuBLAS for many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional

from engine.ops import Ops
from engine.ops.dependent import EARLY
from engine.ops.experts import Stack, StackedExperts, stack, stack_scaled
from engine.ops.grouped import multiply_scaled
from engine.plugins.quantization.narrow.kernel import Tiling, narrow
from engine.specs.quantization import Experts, Linear, Quantization
from engine.specs.weight_loader import WeightSource

MOST_ROWS: Final = 64
"""From here on the product is no longer bound by reading the weight alone, and cuBLAS wins."""

MOST_TILES: Final = 8192


class Workspace:
    """What the kernels of one device share; products run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.counters = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)
        self.partials = torch.empty(0, dtype=torch.float32, device=device)
        on_cuda = device.type == "cuda"
        self.processors = torch.cuda.get_device_properties(device).multi_processor_count if on_cuda else 4

    def reserve(self, floats: int) -> None:
        """Grow the memory for partial sums; only while the model is built, for graphs keep its address."""
        if self.partials.numel() < floats:
            self.partials = torch.empty(floats, dtype=torch.float32, device=self.partials.device)


class NarrowLinear(Linear):
    """y = x W^T + b, summed in float32 and rounded once."""

    def __init__(self, weight: Tensor, bias: Tensor | None, workspace: Workspace) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias, self._workspace = weight, bias, workspace
        self._tilings = {
            rows: tiling(self.out_features, self.in_features, rows, workspace.processors) for rows in (16, 32, 64)
        }
        for rows, cut in self._tilings.items():
            if cut is not None and cut.split > 1:
                workspace.reserve(triton.cdiv(self.out_features, cut.rows) * cut.split * cut.rows * rows)

    def __call__(self, x: Tensor) -> Tensor:
        if (cut := self._tiling(x.shape[0])) is None:
            return functional.linear(x, self._weight, self._bias)
        return self._launch(x, cut, self.out_features, gated=False)

    def gated(self, x: Tensor, ops: Ops) -> Tensor:
        cut = self._tiling(x.shape[0])
        if cut is None or cut.split > 1 or self.out_features % 2:
            return ops.silu_mul(self(x))
        return self._launch(x, cut, self.out_features // 2, gated=True)

    def _tiling(self, m: int) -> Tiling | None:
        return self._tilings[_padded(m)] if m <= MOST_ROWS else None

    def _launch(self, x: Tensor, cut: Tiling, width: int, *, gated: bool) -> Tensor:
        m, weight = x.shape[0], self._weight
        y = torch.empty(m, width, dtype=x.dtype, device=x.device)
        narrow[(triton.cdiv(self.out_features, cut.rows), cut.split)](
            x,
            weight,
            weight if self._bias is None else self._bias,
            y,
            self._workspace.partials,
            self._workspace.counters,
            m,
            self.out_features,
            self.in_features,
            x.stride(0),
            M=_padded(m),
            ROWS=cut.rows,
            DEPTH=cut.depth,
            SPLIT=cut.split,
            BIAS=self._bias is not None,
            GATED=gated,
            STAGES=cut.stages,
            EARLY=EARLY,
            AHEAD=triton.next_power_of_2(cut.ahead or cut.depth * cut.stages),
            num_warps=cut.warps,
            launch_pdl=EARLY,
        )
        return y

    def weight_bytes(self) -> int:
        return self._weight.nbytes + (self._bias.nbytes if self._bias is not None else 0)

    def dense(self) -> Tensor:
        return self._weight


class ScaledLinear(Linear):
    """y = x W^T for a weight in FP8 with one scale for each block; nothing of it is rounded again."""

    def __init__(self, weight: Stack) -> None:
        _, self.out_features, self.in_features = weight.values.shape
        self._weight = weight

    def __call__(self, x: Tensor) -> Tensor:
        return multiply_scaled(x, self._weight)

    def gated(self, x: Tensor, ops: Ops) -> Tensor:
        return multiply_scaled(x, self._weight, gated=True)

    def weight_bytes(self) -> int:
        return self._weight.nbytes


def _padded(m: int) -> int:
    return 16 if m <= 16 else 32 if m <= 32 else 64


def tiling(n: int, k: int, rows: int, processors: int) -> Tiling | None:
    """How to cut a product of up to `rows` rows with a weight [n, k]; None where cuBLAS is faster.

    Measured on an H200. Few tiles split their sums, up to about a program per multiprocessor: more parts read no
    faster, and have to be added up.
    """
    depth = next((depth for depth in (128, 64, 32) if k % depth == 0), None)
    tiles, split = triton.cdiv(n, 64), 1
    if depth is None or tiles > MOST_TILES:
        return None
    while 2 * tiles * split <= 1.1 * processors and split < 8 and k // depth >= 8 * split:
        split *= 2
    if rows < 64:
        return Tiling(64, depth, split, 4, 3 if split == 1 else 6 if k > 2 * n else 4)
    return Tiling(128, 64, 1, 8, 3) if split == 1 and k % 64 == 0 else None


class NarrowQuantization(Quantization):
    """Keeps every weight in one dtype; with `scaled`, in FP8 what the checkpoint stores in FP8 with scales."""

    def __init__(self, dtype: torch.dtype, *, scaled: bool = False) -> None:
        self._dtype, self._scaled = dtype, scaled
        self._workspaces: dict[torch.device, Workspace] = {}

    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        if not bias and (kept := self._kept(source, [names], device)) is not None:
            return ScaledLinear(kept)
        weight = source.joined(names, self._dtype, device)
        added = source.joined(bias, self._dtype, device) if bias else None
        return NarrowLinear(weight, added, self._workspace(weight.device))

    def head(self, embedding: Tensor) -> Linear:
        return NarrowLinear(embedding, None, self._workspace(embedding.device))

    def _workspace(self, device: torch.device) -> Workspace:
        return self._workspaces.setdefault(device, Workspace(device))

    def experts(self, source: WeightSource, names: Sequence[Sequence[str]], device: torch.device) -> Experts:
        parts = [one[:2] for one in names], [one[2:] for one in names]
        gate_up, down = (self._kept(source, part, device) or stack(source, part, self._dtype, device) for part in parts)
        return StackedExperts(gate_up, down)

    def _kept(self, source: WeightSource, names: Sequence[Sequence[str]], device: torch.device | None) -> Stack | None:
        return stack_scaled(source, names, device) if self._scaled else None


__all__ = ["NarrowLinear", "NarrowQuantization", "tiling"]
