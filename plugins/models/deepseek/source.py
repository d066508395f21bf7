"""A DeepSeek checkpoint as the decoder wants it: FP8 with its scales or dense, rotated pairs as halves, and the network
that all tokens share cut into experts like the others.

Wraps what the weight loader opened, so that every quantization reads through it like through any other checkpoint.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor

from engine.plugins.models.deepseek.shape import DeepseekShape
from engine.specs.weight_loader import Scaled, WeightSource

_SCALE: Final = "_scale_inv"
_EXPERT: Final = re.compile(r"(.*\.mlp\.)experts\.(\d+)(\.(?:gate|up|down)_proj\.weight)")


class DeepseekSource(WeightSource):
    """The weights of one checkpoint.

    Where `quantization_config` says FP8, each element of a stored matrix is multiplied by the scale of its block, found
    under the matrix's name plus `_scale_inv`. The rows that make the rotary parts of queries and keys are reordered
    from neighbouring pairs to halves, which leaves every score as it is and suits `Ops.rope`. Experts beyond the routed
    ones are equal slices of the inner width of the shared network; the sum of their outputs is its output.
    """

    def __init__(self, inner: WeightSource, shape: DeepseekShape) -> None:
        self._inner, self._shape = inner, shape
        self._block = shape.block
        self._routed = shape.routing.experts if shape.routing else 0

    def names(self) -> Iterable[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        stored, part = self._stored(name)
        shape = self._inner.shape(stored)
        if part is None:
            return shape
        inner = self._shape.expert_intermediate
        return (shape[0], inner) if _is_down(name) else (inner, shape[1])

    def origin(self, name: str) -> str:
        return self._inner.origin(self._stored(name)[0])

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Also the scales of what is stored in blocks; their names are known from the header alone."""
        scales = {
            f"{name}{_SCALE}": (-(-shape[0] // self._block[0]), -(-shape[1] // self._block[1]))
            for name, shape in shapes.items()
            if self._block and _in_blocks(name)
        }
        self._inner.expect({**shapes, **scales})

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        stored, part = self._stored(name)
        if self._block and _in_blocks(name):
            values = self._dequantized(stored, self._block).to(dtype)
        else:
            values = self._inner.get(stored, dtype)
        if part is not None:
            values = self._slice(name, values, part, 1)
        if self._shape.interleaved:
            values = self._halved(name, values)
        return values if rows is None else values[rows]

    def scaled(self, name: str) -> Scaled | None:
        """Rotary rows may change places within a block, and a slice end between two; else the matrix is dequantized."""
        if self._block is None or not _in_blocks(name) or self._block[0] != self._block[1]:
            return None
        stored, part = self._stored(name)
        side, scales = self._block[0], self._scales(stored)
        values = self._inner.get(stored, torch.float8_e4m3fn)
        if part is not None:
            if self._shape.expert_intermediate % side:
                return None
            values, scales = self._slice(name, values, part, 1), self._slice(name, scales, part, side)
        if self._shape.interleaved and (turned := self._rotary_rows(name)):
            if any(first // side != (end - 1) // side for first, end in turned):
                return None
            values = self._halved(name, values.view(torch.uint8)).view(torch.float8_e4m3fn)
        return Scaled(values=values, scales=scales, side=side)

    def digest(self) -> str:
        return self._inner.digest()

    def close(self) -> None:
        self._inner.close()

    def _stored(self, name: str) -> tuple[str, int | None]:
        """The name in the file, and for a slice of the shared network which one."""
        found = _EXPERT.fullmatch(name)
        if found is None or (expert := int(found[2])) < self._routed:
            return name, None
        return f"{found[1]}shared_experts{found[3]}", expert - self._routed

    def _slice(self, name: str, values: Tensor, part: int, side: int) -> Tensor:
        """Of a matrix with one element for each block of `side` inner elements."""
        width = self._shape.expert_intermediate // side
        return values.narrow(1 if _is_down(name) else 0, part * width, width)

    def _scales(self, stored: str) -> Tensor:
        """float32.

        Raises:
            ValueError: a scale is not a finite number.
        """
        scales = self._inner.get(f"{stored}{_SCALE}", torch.float32)
        if not scales.isfinite().all():
            raise ValueError(f"{self._inner.origin(stored)}: tensor {stored}{_SCALE} has scales that are not finite")
        return scales

    def _dequantized(self, stored: str, block: tuple[int, int]) -> Tensor:
        """float32. The last blocks of a matrix may be cut off; raises as `_scales` does."""
        values, scales = self._inner.get(stored, torch.float32), self._scales(stored)
        for at, size in enumerate(block):
            scales = scales.repeat_interleave(size, at).narrow(at, 0, values.shape[at])
        return values * scales

    def _rotary_rows(self, name: str) -> list[tuple[int, int]]:
        """The runs of rows, first and end, whose pairs rotate."""
        shape = self._shape
        if name.endswith(("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")):
            ends = [(head + 1) * (shape.nope + shape.rope_dim) for head in range(shape.heads)]
        elif name.endswith("self_attn.kv_a_proj_with_mqa.weight"):
            ends = [shape.row]
        else:
            ends = []
        return [(end - shape.rope_dim, end) for end in ends]

    def _halved(self, name: str, values: Tensor) -> Tensor:
        order = torch.arange(values.shape[0])
        for first, end in self._rotary_rows(name):
            order[first:end] = torch.cat((order[first:end:2], order[first + 1 : end : 2]))
        return values[order] if self._rotary_rows(name) else values


def _is_down(name: str) -> bool:
    return name.endswith("down_proj.weight")


def _in_blocks(name: str) -> bool:
    """Every projection of a layer; embeddings, the output layer, norms, routers and `eh_proj` stay as they are."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight")) and not name.endswith("eh_proj.weight")


__all__ = ["DeepseekSource"]
