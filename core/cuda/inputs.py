"""The inputs of a step: buffers made once, filled by one copy from pinned memory and one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from engine.cuda.prepare import ROW, prepare
from engine.randomness import uniform
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBatch

IN_FLIGHT = 3
"""Steps whose pinned memory may still be read by the device: the one that runs, the next, and the one being packed."""


@dataclass(frozen=True, slots=True)
class RowInput:
    """One request's share of a step, as the device is told."""

    slot: int
    start: int
    first_page: int
    new_pages: np.ndarray  # int32
    count: int
    ids: np.ndarray | None  # int32 [count]; None takes the token that the device sampled last
    sampling: tuple[int, ...]  # see `sampling_fields`


def sampling_fields(params: SamplingParams | None, seed: int = 0, position: int = 0) -> tuple[int, ...]:
    """The integers of a row from `SAMPLES` on; without params the row does not sample."""
    if params is None:
        return (0,) * 8
    at = 0.0 if params.greedy else uniform(seed, position)
    coarse = float(np.float32(at))
    floats = np.array([params.temperature, params.top_p, params.min_p, coarse, at - coarse], dtype=np.float32)
    temperature, top_p, min_p, high, low = floats.view(np.int32).tolist()
    return (1, temperature, params.top_k, top_p, min_p, high, low, 0)


class StepInputs:
    """Buffers of one device.

    Args:
        slots: requests that may be computed at once, and the rows of the tables.
        max_tokens: tokens of one step.
        max_pages: pages of one request.
    """

    def __init__(self, *, slots: int, max_tokens: int, max_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size, self.max_tokens = page_size, max_tokens
        size = slots * (ROW + max_pages) + max_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        pinned = device.type == "cuda"
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=pinned) for _ in range(IN_FLIGHT)]
        self._next = 0
        self.packed, self.last_tokens, self.tables = zeros(size), zeros(slots), zeros(slots, max_pages)
        self.tokens, self.positions = zeros(max_tokens, dtype=torch.int64), zeros(max_tokens, dtype=torch.int64)
        self.slot_mapping, self.last_index = zeros(max_tokens, dtype=torch.int64), zeros(slots, dtype=torch.int64)
        self.query_start, self.seq_lens = zeros(slots + 1), zeros(slots)
        self.block_tables = zeros(slots, max_pages)

    def send(self, rows: Sequence[RowInput], padded: int) -> None:
        """Copy what the host knows of a step; rows up to `padded` are padding of one token each."""
        staged = self._staged[self._next]
        self._next = (self._next + 1) % IN_FLIGHT
        packed = staged.numpy()
        counts = [row.count for row in rows]
        firsts = [0, *accumulate(counts)]
        at = padded * ROW
        for number, row in enumerate(rows):
            pages_at, at = at, at + len(row.new_pages)
            packed[pages_at:at] = row.new_pages
            ids_at = -1
            if row.ids is not None:
                ids_at, at = at, at + row.count
                packed[ids_at:at] = row.ids
            known = (row.slot, row.start, row.count, firsts[number], pages_at, row.first_page, len(row.new_pages))
            packed[number * ROW : (number + 1) * ROW] = (*known, ids_at, *row.sampling)
        for number in range(len(rows), padded):
            packed[number * ROW : (number + 1) * ROW] = (-1, 0, 1, firsts[-1] + number - len(rows)) + (0,) * 12
        self.packed[:at].copy_(staged[:at], non_blocking=True)

    def prepare(self, rows: int) -> None:
        """Make the tensors of a batch out of what was sent; one launch."""
        prepare[(rows,)](
            self.packed,
            self.last_tokens,
            self.tables,
            self.tokens,
            self.positions,
            self.slot_mapping,
            self.query_start,
            self.seq_lens,
            self.last_index,
            self.block_tables,
            self.tables.stride(0),
            self.block_tables.stride(0),
            PAGE=self.page_size,
            BLOCK=256,
        )

    def batch(self, query_lens: np.ndarray, seq_lens: np.ndarray) -> AttentionBatch:
        """The prepared batch; the arrays are int32 [R], requests with one token first."""
        rows, tokens = len(query_lens), int(query_lens.sum())
        return AttentionBatch(
            query_start=self.query_start[: rows + 1],
            seq_lens=self.seq_lens[:rows],
            block_tables=self.block_tables[:rows],
            slot_mapping=self.slot_mapping[:tokens],
            positions=self.positions[:tokens],
            num_decodes=int((query_lens == 1).sum()),
            query_lens_host=query_lens,
            seq_lens_host=seq_lens,
        )


__all__ = ["IN_FLIGHT", "RowInput", "StepInputs", "sampling_fields"]
