"""Multi-head latent attention on Hopper: absorbed queries by its own kernels, long chunks expanded by the common rule.

Called on the runner's thread. Every new token that is not expanded is a row of its own for the kernels, with its own
length; `plan` and `forward` of a batch of decodes read lengths on the device only, so they may be captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from engine.latent.backend import LatentBackend
from engine.latent.triton_dense import TritonDense
from engine.plugin import DeviceProfile, KVKind
from engine.plugins.attention.flashmla.launch import LATENT, PAGE, WIDTH, Decode, Line
from engine.specs.attention import AttentionBatch, AttentionShape

DTYPE: Final = "bfloat16"

SPEED: Final = 1.4
"""Of cuBLAS compared with the absorbed kernels: 780 against 550 TFLOP/s on an H200."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The absorbed rows of one step."""

    line: Line | None  # None: no row
    slots: Tensor  # int64 [T]


class FlashMLA(LatentBackend):
    """Rows of 512 + 64 in pages of 64, bfloat16 or packed; any number of heads, causal."""

    def __init__(self, shape: AttentionShape, page_size: int, device: DeviceProfile) -> None:
        refuse(shape, page_size)
        super().__init__(shape, page_size, dense=TritonDense(torch.bfloat16), speed=SPEED)
        self._decode = Decode(shape.heads, shape.scale, torch.device(device.kind), packed=shape.packed)

    def plan_absorbed(self, batch: AttentionBatch) -> Plan:
        """Lay the line of the step's rows."""
        if batch.tree_masks:
            raise ValueError("attention backend 'flashmla' has no tree masks; let the speculator draft chains")
        if not len(batch.slot_mapping):
            return Plan(None, batch.slot_mapping)
        lens, tables = batch.seq_lens, batch.block_tables
        if batch.num_decodes < len(batch.query_lens_host):  # short chunks: every token is a row
            owners = torch.arange(len(batch.query_lens_host)).repeat_interleave(torch.from_numpy(batch.query_lens_host))
            lens, tables = (batch.positions + 1).int(), tables[owners.to(tables.device, non_blocking=True)]
        return Plan(self._decode.plan(lens, tables), batch.slot_mapping)

    def attend(self, layer: int, q: Tensor, k: Tensor, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        """See `LatentBackend.attend`."""
        if plan.line is None:
            return q.new_empty(0, self.shape.heads, LATENT)
        self._decode.store(k[:, 0], plan.slots, kv[0])
        return self._decode(q, kv[0], plan.line)


def refuse(shape: AttentionShape, page_size: int) -> None:
    """Raise ValueError for what the kernels can't do."""
    if shape.kind is not KVKind.MLA:
        raise ValueError(f"attention backend 'flashmla' keeps latent rows (KV kind mla), not {shape.kind}")
    if (shape.head_dim, shape.v_head_dim) != (WIDTH, LATENT):
        found = f"{shape.head_dim} with a latent of {shape.v_head_dim}"
        raise ValueError(f"attention backend 'flashmla' needs rows of {WIDTH} with a latent of {LATENT}, not {found}")
    if page_size != PAGE:
        raise ValueError(f"attention backend 'flashmla' needs pages of {PAGE} tokens, not {page_size}")
    if shape.dtype != DTYPE:
        raise ValueError(f"attention backend 'flashmla' computes in {DTYPE}, not {shape.dtype}")
    if any(shape.windows) or shape.softcap is not None:
        raise ValueError("attention backend 'flashmla' has no sliding windows and no soft caps")


__all__ = ["FlashMLA", "refuse"]
