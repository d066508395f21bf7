"""The inputs of a step: buffers made once, filled by one copy from pinned memory and one kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.cuda.prepare import (
    COUNT,
    FIRST_PAGE,
    FIRST_TOKEN,
    IDS_AT,
    PAGES,
    PAGES_AT,
    ROW,
    SAMPLES,
    SLOT,
    START,
    prepare,
)
from engine.randomness import uniform
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBatch

IN_FLIGHT = 3
"""Steps whose pinned memory may still be read by the device: the one that runs, the next, and the one being packed."""

NOT_SAMPLED = (0,) * 8
GREEDY = (1,) + (0,) * 7


@dataclass(frozen=True, slots=True)
class RowInputs:
    """What the host knows of the R requests of a step; arrays of R each."""

    slots: np.ndarray  # int32
    starts: np.ndarray  # int32; positions of their first tokens
    counts: np.ndarray  # int32; tokens
    first_pages: np.ndarray  # int32; where in their tables the new pages go
    pages: Mapping[int, np.ndarray]  # row -> int32, its new pages
    ids: Mapping[int, np.ndarray]  # row -> int32 [count], its tokens; others take the one that the device sampled last
    sampling: np.ndarray  # int32 [R, 8], see `sampling_fields`


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
        self.drafts = zeros(max_rows, dtype=torch.int64)  # whose tokens rows of `send_drafts` take

    def send(self, rows: RowInputs, padded: int, *, spread: bool = False, width: int = 0) -> None:
        """Copy what the host knows of a step.

        Args:
            padded: rows of the record; those beyond the given ones are padding of one token each.
            spread: every token is a row of its own.
            width: every request has so many rows: its newest token, `count - 1` drafts, and padding. `rows.sampling`
                then has fields for each of these rows.
        """
        staged, copied = self._staged[self._next], self._copied[self._next]
        if copied is not None:
            copied.synchronize()  # the copy of three steps ago: long done
        record, at = staged.numpy(), padded * ROW
        lines = np.zeros((len(rows.slots), ROW), dtype=np.int32)
        lines[:, SLOT], lines[:, START], lines[:, COUNT] = rows.slots, rows.starts, rows.counts
        lines[:, FIRST_TOKEN] = np.cumsum(rows.counts) - rows.counts
        lines[:, FIRST_PAGE], lines[:, IDS_AT] = rows.first_pages, -1
        if not width:
            lines[:, SAMPLES:] = rows.sampling
        for row, pages in rows.pages.items():
            lines[row, PAGES_AT], lines[row, PAGES] = at, len(pages)
            record[at : (at := at + len(pages))] = pages
        for row, ids in rows.ids.items():
            lines[row, IDS_AT] = at
            record[at : (at := at + len(ids))] = ids
        if width:
            lines = _drafted(lines, rows.sampling, width)
        elif spread:
            lines = _spread(lines)
        table, used = record[: padded * ROW].reshape(padded, ROW), len(lines)
        table[:used], table[used:] = lines, 0
        table[used:, SLOT], table[used:, COUNT] = -1, 1
        table[used:, FIRST_TOKEN] = np.arange(padded - used) + (used if width else rows.counts.sum())
        self.packed[:at].copy_(staged[:at], non_blocking=True)
        if self._on_cuda:
            if copied is None:
                copied = self._copied[self._next] = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
        self._next = (self._next + 1) % IN_FLIGHT

    def send_padding(self, padded: int) -> None:
        """A step of so many rows that is of no request."""
        none = np.zeros(0, dtype=np.int32)
        self.send(RowInputs(none, none, none, none, {}, {}, none.reshape(0, ROW - SAMPLES)), padded)

    def prepare(self, rows: int) -> None:
        """Make the tensors of a batch out of what was sent; one launch."""
        prepare[(rows,)](
            self.packed,
            self.last_tokens,
            self.drafts,
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

    def batch(
        self, query_lens: np.ndarray, seq_lens: np.ndarray, *, spread: bool = False, may_share: bool = True
    ) -> AttentionBatch:
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
            may_share=may_share,
        )


def _spread(lines: np.ndarray) -> np.ndarray:
    """A row for every token; the last of a request samples."""
    counts = lines[:, COUNT]
    found = np.repeat(lines, counts, axis=0)
    within = np.arange(len(found)) - found[:, FIRST_TOKEN]
    last = within == found[:, COUNT] - 1
    found[:, START] += within
    found[:, FIRST_TOKEN] += within
    found[:, IDS_AT] += np.where(found[:, IDS_AT] >= 0, within, 0)
    found[:, COUNT] = 1
    found[~last, SAMPLES:] = 0
    return found


def _drafted(lines: np.ndarray, sampling: np.ndarray, width: int) -> np.ndarray:
    """`width` rows for every request: the newest token, then drafts, which lie on the device, then padding."""
    found = np.repeat(lines, width, axis=0)
    number = np.arange(len(found))
    row, within = number // width, number % width
    beyond = within >= found[:, COUNT]
    found[:, START] += within
    found[:, FIRST_TOKEN], found[:, SAMPLES:] = number, sampling
    found[:, IDS_AT] = np.where(within, -1 - row * (width - 1) - within, found[:, IDS_AT])
    found[:, COUNT] = 1
    found[beyond, SLOT], found[beyond, SAMPLES:] = -1, 0
    return found


__all__ = ["IN_FLIGHT", "RowInputs", "StepInputs", "sampling_fields"]
