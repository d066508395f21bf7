"""Blocks in the order in which the compiled kernel reads them; `native_kernels.h` has the layout."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.ops.arena import Arena
from engine.ops.native import PANEL_ROWS, QuantWeight
from engine.specs.weight_loader import Blocks


def pack(blocks: Blocks, bias: Tensor | None, arena: Arena) -> QuantWeight:
    """A weight for `quant_linear`; rows are padded to whole panels with zeros."""
    rows, count = blocks.scale.shape
    panels, words = -(-rows // PANEL_ROWS), blocks.bits
    vectors = [blocks.scale]
    if blocks.bits == 4 or blocks.offset is not None:
        vectors.append(torch.zeros_like(blocks.scale) if blocks.offset is None else blocks.offset)
    codes_end, line = 4 * words * PANEL_ROWS, 2 * PANEL_ROWS
    size = codes_end + line * len(vectors)
    packed = arena.take(panels * count * size).view(panels, count, size)
    codes = blocks.codes.contiguous().view(torch.uint8)
    if blocks.bits == 8:
        codes = codes ^ 128
    interleaved = _padded(codes.view(torch.int32), panels).permute(0, 2, 3, 1)  # [panels, blocks, words, PANEL_ROWS]
    packed[..., :codes_end] = interleaved.flatten(2).view(torch.uint8)
    for at, vector in enumerate(vectors):
        begin = codes_end + at * line
        packed[..., begin : begin + line] = _padded(vector, panels).transpose(1, 2).contiguous().view(torch.uint8)
    return QuantWeight(
        packed=packed,
        bias=bias,
        out_features=rows,
        in_features=count * 32,
        bits=blocks.bits,
        offsets=len(vectors) == 2,
    )


def _padded(rows: Tensor, panels: int) -> Tensor:
    """[rows, …] -> [panels, PANEL_ROWS, …]."""
    missing = panels * PANEL_ROWS - len(rows)
    if missing:
        rows = torch.cat((rows, rows.new_zeros(missing, *rows.shape[1:])))
    return rows.view(panels, PANEL_ROWS, *rows.shape[1:])


__all__ = ["pack"]
