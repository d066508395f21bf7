"""From latent rows to every head's keys and values, and the same products taken on the side of queries and outputs.

With W the up-projection, q · (W c) = (Wᵀ q) · c: a query is multiplied once instead of each row that it meets
(DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from engine.ops import Ops
from engine.ops.reference import TorchOps


class Expanded(NamedTuple):
    """Keys and values of n rows. The rotary part of a key is the row's own, for all heads."""

    keys: Tensor  # [n, heads, nope]
    rotary: Tensor  # [n, rope]
    values: Tensor  # [n, heads, value]


@dataclass(frozen=True, slots=True, eq=False)
class LatentUp:
    """The up-projection of one layer's rows, one matrix per head; key and value are views into `weight`."""

    weight: Tensor  # [heads * (nope + value), latent], keys of all heads first
    key: Tensor  # [heads, nope, latent]
    value: Tensor  # [heads, value, latent]
    ops: Ops = TorchOps()  # noqa: RUF009 (it holds nothing)

    @classmethod
    def of(cls, heads: Tensor, nope: int, ops: Ops | None = None) -> Self:
        """From [heads, nope + value, latent], as a checkpoint has it."""
        count, width, latent = heads.shape
        key, value = heads.split_with_sizes((nope, width - nope), 1)
        weight = torch.cat((key.reshape(-1, latent), value.reshape(-1, latent)))
        key, value = weight.split_with_sizes((count * nope, count * (width - nope)))
        return cls(weight, key.view(count, nope, latent), value.view(count, -1, latent), ops or TorchOps())

    def to(self, device: torch.device) -> Self:
        """The same in another place."""
        weight, key, value = (part.to(device) for part in (self.weight, self.key, self.value))
        return type(self)(weight, key, value, self.ops)

    def absorb(self, queries: Tensor) -> Tensor:
        """[T, heads, nope + rope] -> [T, heads, latent + rope], which meet rows as they are stored."""
        return self.ops.absorb(queries, self.key)

    def mixed(self, latents: Tensor) -> Tensor:
        """Weighted sums of latents [T, heads, latent] -> those of values [T, heads, value]."""
        return self.ops.lift(latents, self.value)

    def expand(self, rows: Tensor) -> Expanded:
        """Rows [n, latent + rope] -> keys and values, strided views into one product."""
        heads, nope, latent = self.key.shape
        made = rows[:, :latent] @ self.weight.T
        keys, values = made.split_with_sizes((heads * nope, made.shape[1] - heads * nope), 1)
        return Expanded(keys.view(-1, heads, nope), rows[:, latent:], values.view(len(rows), heads, -1))


__all__ = ["Expanded", "LatentUp"]
