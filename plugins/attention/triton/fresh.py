"""Launches the kernel of `hopper` where it fits."""

from __future__ import annotations

import logging
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.plugin import DeviceProfile
from engine.specs.attention import AttentionBatch, AttentionShape

log = logging.getLogger(__name__)

ROWS: Final = 128
"""Tokens of a tile, and keys of a block."""

WARPS: Final = 8


class Fresh:
    """Long prompts without a past, for one model."""

    def __init__(self, shape: AttentionShape, scale: float) -> None:
        self._shape, self._scale, self._works = shape, scale, True

    @staticmethod
    def fits(shape: AttentionShape, device: DeviceProfile) -> bool:
        """Whether the kernel knows such a model and such a device."""
        widths = {shape.head_dim, shape.v_head_dim} <= {64, 128}
        plain = widths and shape.softcap is None and shape.dtype in ("bfloat16", "float16")
        capable = device.kind == "cuda" and torch.cuda.get_device_capability() == (9, 0)
        return plain and capable

    def launch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: AttentionBatch, tiles: int) -> bool:
        """Attention of all requests but the decodes; `tiles` as for `prefill`. False if another kernel must do it."""
        if not (self._works and all(map(_is_taken, (q, k, v)))):
            return False
        try:
            self._launch(q, k, v, out, batch, tiles)
        except (ImportError, AttributeError, TypeError, triton.TritonError) as error:
            log.warning("attention 'triton': prompts take the portable kernel, about 1.3 times slower: %s", error)
            self._works = False
        return self._works

    def _launch(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, batch: AttentionBatch, tiles: int) -> None:
        from engine.plugins.attention.triton.hopper import descriptor, prefill_fresh

        shape = self._shape
        prefill_fresh[(shape.heads, tiles)](
            *(descriptor(x, ROWS) for x in (q, k, v)),
            out,
            batch.query_start,
            batch.num_decodes,
            len(batch.query_lens_host),
            self._scale,
            GROUP=shape.heads // shape.kv_heads,
            HEADS=shape.heads,
            DIM=shape.head_dim,
            V_DIM=shape.v_head_dim,
            ROWS=ROWS,
            BLOCK=ROWS,
            num_warps=WARPS,
        )


def _is_taken(x: Tensor) -> bool:
    """Whether the heads of a token lie one behind the other, at addresses that the copy engine takes."""
    return x.stride(1) == x.shape[2] and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0


__all__ = ["ROWS", "Fresh"]
