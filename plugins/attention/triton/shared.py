"""Launches what reads a prefix once for all decodes that share it; the kernels are in `cascade`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.ops.dependent import EARLY
from engine.plugins.attention.triton.cascade import (
    LEAST_KEYS,
    LEAST_MEMBERS,
    SPLITS,
    attend_shared,
    find_groups,
    list_groups,
)
from engine.specs.attention import AttentionBatch, AttentionShape, Rotation

ROWS: Final = 128
"""Rows of a tile, requests times the heads of a KV head."""


@dataclass(frozen=True, slots=True)
class Shared:
    """The groups of one step and what all layers leave of them; see the kernels for the tensors."""

    out: Tensor
    stats: Tensor
    members: Tensor
    tiles: Tensor
    own_start: Tensor
    parts: Tensor


class Cascade:
    """The groups of one model's decodes.

    Args:
        programs: that work at once, for each KV head.
        common: arguments that all kernels of the backend share.
        block, warps, stages: how tiles are cut.
    """

    def __init__(
        self,
        shape: AttentionShape,
        page_size: int,
        device: torch.device,
        programs: int,
        common: Mapping[str, Any],
        *,
        block: int,
        warps: int,
        stages: int,
    ) -> None:
        self._shape, self._page_size, self._device, self._programs = shape, page_size, device, programs
        self._pack = triton.next_power_of_2(shape.heads // shape.kv_heads)
        self._members = max(ROWS // self._pack, 1)
        self._key = max(LEAST_KEYS // page_size, 1) - 1
        self._block, self._warps, self._stages, self._common = block, warps, stages, common

    def plan(self, batch: AttentionBatch) -> Shared | None:
        """Find the groups; None where there can't be any. Reads nothing that only the device knows."""
        requests = batch.num_decodes
        if requests < LEAST_MEMBERS or not batch.may_share or batch.block_tables.shape[1] <= self._key:
            return None
        shape, clear = self._shape, 1 + -(-self._members // LEAST_MEMBERS)

        def ints(*size: int) -> Tensor:
            return torch.empty(*size, dtype=torch.int32, device=self._device)

        def floats(width: int) -> Tensor:
            return torch.empty(requests * SPLITS, shape.heads, width, dtype=torch.float32, device=self._device)

        groups, members, tiles = ints(3, requests), ints(clear * requests), ints(2 + clear * requests)
        own_start, parts = ints(requests), ints(requests)
        sizes = {"REQUESTS": triton.next_power_of_2(requests), "PAGE": self._page_size}
        find_groups[(requests,)](
            batch.seq_lens,
            batch.block_tables,
            groups,
            members,
            requests,
            batch.block_tables.stride(0),
            KEY=self._key,
            LEAST=LEAST_MEMBERS,
            CLEAR=clear,
            CLEAR_PAD=triton.next_power_of_2(clear),
            **sizes,
        )
        list_groups[(requests,)](
            groups,
            members,
            tiles,
            own_start,
            parts,
            requests,
            2 * self._programs,
            MEMBERS=self._members,
            SPLITS=SPLITS,
            **sizes,
        )
        return Shared(floats(shape.v_head_dim), floats(2), members, tiles, own_start, parts)

    def attend(
        self,
        q: Tensor,
        kv: Sequence[Tensor],
        batch: AttentionBatch,
        shared: Shared,
        rotation: Rotation | None,
        scale: float,
        softcap: float,
    ) -> None:
        """Leave the parts of one layer."""
        attend_shared[(self._programs, self._shape.kv_heads)](
            q,
            *kv[:2],
            *kv[-2:],
            shared.out,
            shared.stats,
            shared.members,
            shared.tiles,
            batch.block_tables,
            batch.positions,
            shared.stats if rotation is None else rotation.cos_sin,
            *q.stride()[:2],
            kv[0].stride(0),
            kv[1].stride(0),
            batch.block_tables.stride(0),
            scale,
            softcap,
            ROWS=self._members * self._pack,
            PACK=self._pack,
            SPLITS=SPLITS,
            BLOCK=self._block,
            STAGES=self._stages,
            ROTATE=rotation is not None,
            EARLY=EARLY,
            num_warps=self._warps,
            launch_pdl=EARLY,
            **self._common,
        )


__all__ = ["Cascade", "Shared"]
