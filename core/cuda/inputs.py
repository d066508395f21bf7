"""The inputs of a step: buffers made once, filled by one copy from pinned memory and one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cuda.prepare import ROW, prepare
from engine.randomness import uniform
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBatch

IN_FLIGHT = 3
"""Steps whose pinned memory may still be read by the device: the one that runs, the next, and the one being packed."""

NOT_SAMPLED = (0,) * 8
GREEDY = (1,) + (0,) * 7
PADDING = (0,) * 12


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
        return NOT_SAMPLED
    if params.greedy:
        return GREEDY
    at = uniform(seed, position)
    coarse = float(np.float32(at))
    floats = np.array([params.temperature, params.top_p, params.min_p, coarse, at - coarse], dtype=np.float32)
    temperature, top_p, min_p, high, low = floats.view(np.int32).tolist()
    return (1, temperature, params.top_k, top_p, min_p, high, low, 0)


class StepInputs:
    """Buffers of one device.

    Args:
        slots: requests that may be computed at once.
        max_rows: rows of one step, at least as many.
        max_tokens: tokens of one step.
        max_pages: pages of one request.
    """

    def __init__(
        self,
        *,
        slots: int,
        max_rows: int,
        max_tokens: int,
        max_pages: int,
        page_size: int,
        device: torch.device,
    ) -> None:
        self.page_size, self.max_tokens = page_size, max_tokens
        size = max_rows * ROW + slots * max_pages + max_tokens

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self._on_cuda = device.type == "cuda"
        self._staged = [torch.zeros(size, dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(IN_FLIGHT)]
        self._copied: list[torch.cuda.Event | None] = [None] * IN_FLIGHT
        self._next = 0
        self.packed, self.last_tokens, self.tables = zeros(size), zeros(slots), zeros(slots, max_pages)
        self.tokens, self.positions = zeros(max_tokens, dtype=torch.int64), zeros(max_tokens, dtype=torch.int64)
        self.slot_mapping, self.last_index = zeros(max_tokens, dtype=torch.int64), zeros(max_rows, dtype=torch.int64)
        self.query_start, self.seq_lens = zeros(max_rows + 1), zeros(max_rows)
        self.block_tables = zeros(max_rows, max_pages)

    def send(self, rows: Sequence[RowInput], padded: int, *, spread: bool = False) -> None:
        """Copy what the host knows of a step.

        Args:
            padded: rows of the record; those beyond the given ones are padding of one token each.
            spread: every token is a row of its own.
        """
        staged, copied = self._staged[self._next], self._copied[self._next]
        if copied is not None:
            copied.synchronize()  # the copy of three steps ago: long done
        record, at, used, tokens = staged.numpy(), padded * ROW, 0, 0
        lines: list[tuple[int, ...]] = []
        for row in rows:
            pages_at, ids_at = at, -1
            at += len(row.new_pages)
            record[pages_at:at] = row.new_pages
            if row.ids is not None:
                ids_at, at = at, at + row.count
                record[ids_at:at] = row.ids
            pages = (pages_at, row.first_page, len(row.new_pages))
            for part in range(row.count - 1 if spread else 0):
                here = ids_at + part if ids_at >= 0 else -1
                lines.append((row.slot, row.start + part, 1, tokens + part, *pages, here, *NOT_SAMPLED))
            before = row.count - 1 if spread else 0
            here = ids_at + before if ids_at >= 0 else -1
            known = (row.slot, row.start + before, row.count - before, tokens + before, *pages, here)
            lines.append((*known, *row.sampling))
            tokens += row.count
        used = len(lines)
        lines += [(-1, 0, 1, tokens + number, *PADDING) for number in range(padded - used)]
        record[: padded * ROW] = np.array(lines, dtype=np.int32).ravel()
        self.packed[:at].copy_(staged[:at], non_blocking=True)
        if self._on_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[self._next] = copied
        self._next = (self._next + 1) % IN_FLIGHT

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

    def batch(self, query_lens: np.ndarray, seq_lens: np.ndarray, *, spread: bool = False) -> AttentionBatch:
        """The prepared batch; the arrays are int32 [R], requests with one token first. `spread` as in `send`."""
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
            requests_repeat=spread,
        )


__all__ = ["IN_FLIGHT", "RowInput", "StepInputs", "sampling_fields"]
