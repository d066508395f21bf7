"""A DeepSeek checkpoint as the decoder wants it: dense where it is stored in FP8 blocks, rotated pairs as halves.

Wraps what the weight loader opened, so that every quantization reads through it like through any other checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from engine.plugins.models.deepseek.shape import DeepseekShape
from engine.specs.weight_loader import WeightSource

_SCALE = "_scale_inv"


class DeepseekSource(WeightSource):
    """The weights of one checkpoint.

    Where `quantization_config` says FP8, each element of a stored matrix is multiplied by the scale of its block, found
    under the matrix's name plus `_scale_inv`. The rows that make the rotary parts of queries and keys are reordered
    from neighbouring pairs to halves, which leaves every score as it is and suits `Ops.rope`.
    """

    def __init__(self, inner: WeightSource, shape: DeepseekShape) -> None:
        self._inner, self._shape = inner, shape
        self._block = shape.block

    def names(self) -> Iterable[str]:
        return self._inner.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._inner.shape(name)

    def origin(self, name: str) -> str:
        return self._inner.origin(name)

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Also the scales of what is stored in blocks; their names are known from the header alone."""
        scales = {
            f"{name}{_SCALE}": (-(-shape[0] // self._block[0]), -(-shape[1] // self._block[1]))
            for name, shape in shapes.items()
            if self._block and _in_blocks(name)
        }
        self._inner.expect({**shapes, **scales})

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        if self._block and _in_blocks(name):
            values = self._dequantized(name, self._block).to(dtype)
        else:
            values = self._inner.get(name, dtype)
        if self._shape.interleaved:
            values = self._halved(name, values)
        return values if rows is None else values[rows]

    def digest(self) -> str:
        return self._inner.digest()

    def close(self) -> None:
        self._inner.close()

    def _dequantized(self, name: str, block: tuple[int, int]) -> Tensor:
        """float32. The last blocks of a matrix may be cut off.

        Raises:
            ValueError: a scale is not a finite number.
        """
        values, scales = self._inner.get(name, torch.float32), self._inner.get(f"{name}{_SCALE}", torch.float32)
        if not scales.isfinite().all():
            raise ValueError(f"{self.origin(name)}: tensor {name}{_SCALE} has scales that are not finite")
        for at, size in enumerate(block):
            scales = scales.repeat_interleave(size, at).narrow(at, 0, values.shape[at])
        return values.mul_(scales)

    def _halved(self, name: str, values: Tensor) -> Tensor:
        rotary = self._shape.rope_dim
        if name.endswith(("self_attn.q_proj.weight", "self_attn.q_b_proj.weight")):
            heads = values.view(self._shape.heads, -1, values.shape[-1])
            fixed, turned = heads.split_with_sizes((self._shape.nope, rotary), 1)
            return torch.cat((fixed, turned[:, 0::2], turned[:, 1::2]), 1).flatten(0, 1)
        if name.endswith("self_attn.kv_a_proj_with_mqa.weight"):
            latent, turned = values.split_with_sizes((self._shape.latent, rotary))
            return torch.cat((latent, turned[0::2], turned[1::2]))
        return values


def _in_blocks(name: str) -> bool:
    """Every projection; embeddings, the output layer, norms and routers stay as they are."""
    return name.endswith(("_proj.weight", "_proj_with_mqa.weight"))


__all__ = ["DeepseekSource"]
