"""Linear layers over blocks: by the compiled kernel, or decoded for each product where there is none."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.plugins.quantization.blocks.rounding import BLOCK, dense, rounded, stacked
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import Blocks, WeightSource

Maker = Callable[[Blocks, Tensor | None, bool], Linear]
"""Blocks, a float32 bias, and whether results stay float32 -> the layer."""


class DecodedLinear(Linear):
    """Decodes its weight for each product; inputs are not rounded."""

    def __init__(self, blocks: Blocks, bias: Tensor | None, unrounded: bool) -> None:
        self.out_features = blocks.scale.shape[0]
        self.in_features = blocks.scale.shape[1] * BLOCK
        self._blocks, self._bias, self._unrounded = blocks, bias, unrounded

    def __call__(self, x: Tensor) -> Tensor:
        y = functional.linear(x.float(), dense(self._blocks), self._bias)
        return y if self._unrounded else y.to(x.dtype)

    def weight_bytes(self) -> int:
        kept = (self._blocks.codes, self._blocks.scale, self._blocks.offset, self._bias)
        return sum(tensor.nbytes for tensor in kept if tensor is not None)


class BlockQuantization(Quantization):
    """Takes a file's blocks as they are, and rounds what is stored otherwise to blocks of `bits`."""

    def __init__(self, bits: int, *, kernels: bool) -> None:
        self._bits = bits
        self._make: Maker = _by_kernels() if kernels else _copied

    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        """As the contract says.

        Raises:
            ValueError: the weights' width is no multiple of 32.
        """
        parts = [self._blocks(source, name, self._bits) for name in names]
        added = torch.cat([source.get(name, torch.float32) for name in bias]) if bias else None
        return self._make(parts[0] if len(parts) == 1 else stacked(parts), added, False)

    def head(self, embedding: Tensor) -> Linear:
        """A copy of 8 bits. Its results are float32, never rounded to bfloat16."""
        _check("the embedding", embedding.shape[1])
        return self._make(rounded(embedding.float(), 8), None, True)

    def tied_head(self, source: WeightSource, name: str, embedding: Tensor) -> Linear:
        return self._make(self._blocks(source, name, 8), None, True)

    def _blocks(self, source: WeightSource, name: str, bits: int) -> Blocks:
        """The blocks of a matrix: those stored if they have no more bits than wanted."""
        _check(name, source.shape(name)[1])
        stored = source.blocks(name)
        if stored is not None and stored.bits <= bits:
            return stored
        return rounded(source.get(name, torch.float32), bits)


def _check(name: str, width: int) -> None:
    if width % BLOCK:
        raise ValueError(f"weights in blocks need a width that is a multiple of {BLOCK}, but {name} has {width}")


def _copied(blocks: Blocks, bias: Tensor | None, unrounded: bool) -> Linear:
    """Apart from the file, which may be closed."""
    offset = None if blocks.offset is None else blocks.offset.clone()
    copy = Blocks(bits=blocks.bits, codes=blocks.codes.clone(), scale=blocks.scale.clone(), offset=offset)
    return DecodedLinear(copy, bias, unrounded)


def _by_kernels() -> Maker:
    from engine.plugins.quantization.blocks.kernel import make_layers

    return make_layers()


__all__ = ["BlockQuantization", "DecodedLinear"]
