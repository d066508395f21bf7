"""What backends of kind `mla` have in common: which form a request takes, and the expanded one."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from engine.latent.dense import Dense, TorchDense
from engine.latent.rounds import WORKSPACE, Divided, divide, rows_at_once
from engine.latent.rows import Rows, rows_of
from engine.latent.up import LatentUp
from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape, KVLayout


@dataclass(slots=True)
class LatentPlan:
    """What all layers of a step share. Plans of the absorbed form are made when the first layer wants them."""

    batch: AttentionBatch
    divided: Divided
    rounds: list[Any]  # of `Dense`, for each round
    whole: Any = None  # of all requests
    short: Any = None  # of the short ones


class LatentBackend(AttentionBackend):
    """Subclasses attend with absorbed queries; long chunks are expanded here, in rounds.

    Args:
        rows: writes and reads rows; by what the shape says if unset.
        dense: attends over expanded rows; in plain torch if unset.
        workspace: bytes that expanded keys and values may take.
        speed: how many times faster products with the up-projection run than attention, for as many operations.
    """

    def __init__(
        self,
        shape: AttentionShape,
        page_size: int,
        *,
        rows: Rows | None = None,
        dense: Dense | None = None,
        workspace: int = WORKSPACE,
        speed: float = 1.0,
    ) -> None:
        self.shape, self.page_size = shape, page_size
        self._speed = speed
        self.rows, self._dense = rows or rows_of(shape), dense or TorchDense()
        self._most = rows_at_once(shape, getattr(torch, shape.dtype).itemsize, workspace)

    @abstractmethod
    def plan_absorbed(self, batch: AttentionBatch) -> Any:
        """What all layers share when every request of the batch is absorbed."""

    @abstractmethod
    def attend(self, layer: int, q: Tensor, k: Tensor, kv: tuple[Tensor, ...], plan: Any) -> Tensor:
        """As `forward`, with a plan of `plan_absorbed`."""

    def kv_layout(self) -> KVLayout:
        return self.rows.layout(self.page_size)

    def plan(self, batch: AttentionBatch) -> LatentPlan:
        """Divide the step."""
        divided = divide(batch, self.shape, self.page_size, self._most, self._speed)
        device = batch.slot_mapping.device
        made = LatentPlan(batch, divided, [self._dense.plan(turn.pieces, device) for turn in divided.rounds])
        if not divided.rounds:
            made.whole = self.plan_absorbed(batch)
        elif divided.short is not None:
            made.short = self.plan_absorbed(divided.short)
        return made

    def forward(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: LatentPlan
    ) -> Tensor:
        """See `AttentionBackend.forward`; nothing is expanded."""
        if plan.whole is None:
            plan.whole = self.plan_absorbed(plan.batch)
        return self.attend(layer, q, k, kv, plan.whole)

    def forward_latent(
        self, layer: int, q: Tensor, rows: Tensor, up: LatentUp, kv: tuple[Tensor, ...], plan: LatentPlan
    ) -> Tensor:
        """See `AttentionBackend.forward_latent`; the keys of long chunks come out of the cache, new ones too."""
        divided = plan.divided
        if divided.long_rows is None or divided.long_at is None:
            return super().forward_latent(layer, q, rows, up, kv, plan)
        # Rounds keep what they sum in float32, unless there is nothing to merge.
        dtype = q.dtype if len(divided.rounds) == 1 else torch.float32
        out = q.new_empty(*q.shape[:2], up.value.shape[1], dtype=dtype)
        if divided.short is not None:
            at = divided.short_rows
            mixed = self.attend(layer, up.absorb(q[at]), rows[at, None], kv, plan.short)
            out[at] = up.mixed(mixed).to(dtype)
        self.rows.store(kv[0], divided.long_at, rows[divided.long_rows, None])
        stats = q.new_empty(q.shape[:2], dtype=torch.float32)
        for turn, planned in zip(divided.rounds, plan.rounds, strict=True):
            expanded = up.expand(self.rows.load(kv[0], turn.at)[:, 0])
            self._dense.attend(q, expanded, planned, self.shape.scale, out, stats)
        return out.to(q.dtype)


__all__ = ["LatentBackend", "LatentPlan"]
