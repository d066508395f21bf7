"""Launches of the kernels in `few.cu`: up to 16 heads a program, and the merge of partial results."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from engine.plugins.attention.flashmla.cuda import Map, Module, Pointer, compiled, launch, tensor_map

HEIGHT: Final = 16
"""Query rows of a program."""

_EXCHANGE: Final = 32768 + 256  # bytes of shared memory for what warps tell each other
_BARRIER: Final = 16


@cache
def source() -> str:
    """The kernels."""
    return Path(__file__).with_name("few.cu").read_text()


def macros(heads: int, packed: bool) -> dict[str, int]:
    """What `few.cu` is compiled for; stages and pieces fetched ahead as they were fastest (NOTES.md)."""
    stages, ahead = (8, 0) if packed else (4, 4)
    blocks = -(-heads // HEIGHT)
    return {"PACKED": int(packed), "HEADS": heads, "ROW_BLOCKS": blocks, "STAGES": stages, "AHEAD": ahead}


@cache
def _loaded(heads: int, packed: bool, device: int) -> Module:
    """On PyTorch's current device, whose number is given since each has a context of its own."""
    return Module(compiled(source(), macros(heads, packed)))


def _at(*tensors: Tensor) -> list[Pointer]:
    return [Pointer(tensor.data_ptr()) for tensor in tensors]


class Few:
    """The decode kernel for one number of heads."""

    def __init__(self, heads: int, packed: bool) -> None:
        self._packed, self._blocks = packed, -(-heads // HEIGHT)
        stages, row = macros(heads, packed)["STAGES"], 656 if packed else 1152
        self._shared = 1024 + stages * (32 * row + _BARRIER) + _EXCHANGE
        self._kernel = _loaded(heads, packed, torch.cuda.current_device()).kernel("few", self._shared)

    def __call__(
        self,
        q: Tensor,
        latent: Tensor,
        outputs: tuple[Tensor, Tensor, Tensor],
        work: tuple[Tensor, Tensor, Tensor, Tensor],
        parts: int,
        scale: float,
    ) -> None:
        """q bfloat16 [requests, heads, 576], contiguous; latent as in `launch.Decode`.

        outputs: the results, partial ones and their log-sum-exps; work: starts, firsts, seq_lens, block_tables, see
        `schedule.line`. `scale` carries log2(e).
        """
        if self._packed:
            tiles = Map()
        else:
            tiles = tensor_map(latent.data_ptr(), [64, latent.numel() // 576, 9], [1152, 128], [64, 32, 9])
        row = ctypes.c_long(work[3].stride(0))
        plain: list[ctypes._CData] = [row, ctypes.c_int(q.shape[0]), ctypes.c_float(scale)]
        arguments: list[ctypes._CData] = [tiles, *_at(q, latent, *outputs, *work), *plain]
        launch(self._kernel, (parts * self._blocks, 1, 1), 288, self._shared, arguments)


class Merge:
    """Puts together what parts have of requests that a cut went through."""

    def __init__(self, heads: int, packed: bool) -> None:
        module = _loaded(heads, packed, torch.cuda.current_device())
        self._kernels = {split: module.kernel(f"merge{split}") for split in (1, 4)}

    def __call__(self, outputs: tuple[Tensor, Tensor, Tensor], work: tuple[Tensor, Tensor, Tensor], parts: int) -> None:
        """outputs as for `Few`; work: starts, firsts, seq_lens."""
        out, partial, sums = outputs
        requests, heads = out.shape[:2]
        by_part = requests > parts
        programs = parts if by_part else requests
        split = 4 if programs * heads <= 128 else 1  # few requests are in many parts: narrow columns, eight at a time
        grid = (programs, heads if split == 4 else -(-heads // 2), split)
        arguments: list[ctypes._CData] = [
            *_at(partial, sums, out, *work),
            ctypes.c_int(requests),
            ctypes.c_int(by_part),
        ]
        launch(self._kernels[split], grid, 256, 0, arguments)


__all__ = ["HEIGHT", "Few", "Merge", "macros", "source"]
