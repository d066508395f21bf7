"""The reference for latent rows, plain or in 8 bits: absorbed queries here, expanded rows by the common rule."""

from __future__ import annotations

from typing import Final

from torch import Tensor

from engine.latent.backend import LatentBackend
from engine.plugins.attention.reference.backend import Plan, ReferenceAttention
from engine.specs.attention import AttentionBatch, AttentionShape

WORKSPACE: Final = 16 * 2**20
"""Bytes of expanded keys and values; scores and float32 copies of them take several times as much."""


class ReferenceLatent(LatentBackend):
    """One row per token, every mask, any device and dtype."""

    def __init__(self, shape: AttentionShape, page_size: int) -> None:
        super().__init__(shape, page_size, workspace=WORKSPACE)
        self._absorbed = ReferenceAttention(shape, page_size)

    def plan_absorbed(self, batch: AttentionBatch) -> Plan:
        return self._absorbed.plan(batch)

    def attend(self, layer: int, q: Tensor, k: Tensor, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        self.rows.store(kv[0], plan.slots, k)

        def load(pages: Tensor) -> tuple[Tensor, Tensor]:
            rows = self.rows.load(kv[0], (pages,))
            return rows, rows[..., : self.shape.v_head_dim]

        return self._absorbed.attend(layer, q, load, plan)


__all__ = ["ReferenceLatent"]
