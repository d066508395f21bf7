"""Chains of a resident, drafted and verified on the device: what the host waits for is which tokens came out.

A step has two parts, each a captured graph per number of requests. `verify` computes the newest token and the drafts of
every request, samples behind each and counts how many drafts agree. Once it is under way its outcome travels to the
host, while `follow` goes on without: the resident stores what stands now, and drafts for the next step. So whatever the
host does between two steps costs nothing as long as it takes less time than the drafting.

Every request has as many rows as the longest draft takes; those that it doesn't use are padding.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.cuda.graphs import Graphs
from engine.cuda.inputs import StepInputs
from engine.cuda.sampling import UNSAMPLED
from engine.resident.driver import Resident
from engine.resident.pages import DraftPages, NoLayers
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBatch
from engine.specs.model import Forward
from engine.specs.speculator import DraftBatch, ExtendBatch

log = logging.getLogger(__name__)

MOST_ROWS: Final = 64
"""Rows of a step up to which reading the weights once for all of them is what it costs."""


@dataclass(slots=True, kw_only=True)
class DeviceDrafts(DraftBatch):
    """Requests whose newest tokens only the device knows."""

    pages: DraftPages | None
    tables: Tensor  # int32 [R, P], own pages and then scratch
    most: int  # tokens of one request

    def step(self, first: int, positions: Tensor, sees: Tensor | None = None) -> Forward:
        """See `DraftBatch.step`; one chain of items at a time."""
        if self.pages is None:
            return NoLayers()
        if positions.shape[1] != 1 or sees is not None:
            raise ValueError("only chains are drafted on the device")
        size, rows = self.pages.page_size, len(positions)
        index = self.positions + first
        page = self.tables.gather(1, (index // size).unsqueeze(1))[:, 0].long()
        lens = np.ones(rows, dtype=np.int32)
        return self.pages.planned(
            AttentionBatch(
                query_start=torch.arange(rows + 1, dtype=torch.int32, device=index.device),
                seq_lens=(index + 1).int(),
                block_tables=self.tables,
                slot_mapping=page * size + index % size,
                positions=positions[:, 0],
                num_decodes=rows,
                query_lens_host=lens,
                seq_lens_host=lens * self.most,
                may_share=False,
            )
        )


class DeviceDrafting:
    """The two parts of a step, and where their results lie.

    Args:
        verify: computes and samples rows that were sent; returns the tapped states.
        sampled: where it leaves the tokens, int32 [rows].
        most: tokens of one request.
        graphs: memory pool of graphs; None runs everything eagerly.
    """

    def __init__(
        self,
        inputs: StepInputs,
        resident: Resident,
        verify: Callable[[int], list[Tensor]],
        sampled: Tensor,
        *,
        slots: int,
        most: int,
        graphs: object | None,
    ) -> None:
        self.inputs, self.resident, self._forward, self.sampled = inputs, resident, verify, sampled
        self.width, self._most = resident.chain + 1, most  # rows of a request: its longest draft and one more
        self.most_requests = min(slots, MOST_ROWS // self.width)
        self.accepted = torch.zeros(self.most_requests, dtype=torch.int32, device=sampled.device)
        self._verify: Graphs[list[Tensor]] | None = None
        self._follow: Graphs[None] | None = None
        self._states: dict[int, list[Tensor]] = {}
        if graphs is not None and self.most_requests:
            sizes = [size for size in (1, 2, 4, 8, 16, 32) if size < self.most_requests] + [self.most_requests]
            self._verify = Graphs(self._run_verify, sizes, graphs)
            self._follow = Graphs(self._run_follow, sizes, graphs)

    def size_for(self, requests: int) -> int:
        """Requests that a step of so many is padded to."""
        found = self._follow.size_for(requests) if self._follow else None
        return found or requests

    def captured(self, requests: int) -> bool:
        """Whether steps of this padded size run as graphs."""
        return self._follow is not None and self._follow.size_for(requests) == requests

    def verify(self, requests: int) -> None:
        """Compute and compare the rows that were sent; `requests` as padded."""
        if self._verify is not None and self.captured(requests):
            self._states[requests] = self._verify.replay(requests)
        else:
            self._states[requests] = self._run_verify(requests)

    def follow(self, requests: int) -> None:
        """Let the resident store what stands, and draft."""
        if self._follow is not None and self.captured(requests):
            self._follow.replay(requests)
        else:
            self._run_follow(requests)

    @property
    def next(self) -> int | None:
        """The size to be captured next."""
        return self._follow.next if self._follow is not None else None

    def improve(self) -> bool:
        """Capture one more size; False when all are, or none can be."""
        if self._verify is None or self._follow is None or (size := self._follow.next) is None:
            return False
        try:
            self._capture(self._verify, self._follow, size)
        except Exception as error:  # a stranger's code, which may not bear it; or too little memory
            log.warning("drafts are made without graphs: %s: %s", type(error).__name__, error)
            self._verify.give_up()
            self._follow.give_up()
            torch.cuda.empty_cache()
        return True

    def _capture(self, verify: Graphs[list[Tensor]], follow: Graphs[None], size: int) -> None:
        """Both parts run first, on padding, and the second then on what the graph of the first leaves."""
        self.inputs.send_padding(size * self.width)
        self._states[size] = self._run_verify(size)
        self._run_follow(size)
        verify.capture_next()
        self._states[size] = verify.replay(size)
        follow.capture_next()

    def _run_verify(self, requests: int) -> list[Tensor]:
        width, inputs = self.width, self.inputs
        states = self._forward(requests * width)
        sampled = self.sampled[: requests * width].view(requests, width)
        drafts = inputs.drafts[: requests * (width - 1)].view(requests, width - 1)
        self.accepted[:requests] = agreeing(sampled, drafts)
        return states

    def _run_follow(self, requests: int) -> None:
        width, inputs, rows = self.width, self.inputs, requests * self.width
        first = torch.arange(requests, device=self.sampled.device) * width
        last = first + self.accepted[:requests]
        packed = inputs.packed[: rows * 16].view(rows, 16)
        slots = packed[first, 0].long()
        slots = torch.where(slots < 0, len(inputs.tables), slots)  # of padding
        following = self.sampled[:rows].clamp(min=0).long()
        positions = inputs.positions[:rows]
        states = self._states[requests]
        pages = self.resident.pages
        self.resident.speculator.extend(
            ExtendBatch(
                slots=slots,
                counts=[width] * requests,
                last=last,
                tokens=inputs.tokens[:rows],
                next_tokens=following,
                positions=positions,
                hidden=torch.stack(states, 1) if states else None,
                step=pages.planned(self._batch(rows)) if pages else NoLayers(),
            )
        )
        drafted = self.resident.speculator.draft(
            DeviceDrafts(
                slots=slots,
                tokens=following[last],
                positions=positions[first] + self.accepted[:requests] + 1,
                rooms=[width - 1] * requests,
                params=[SamplingParams(temperature=0.0)] * requests,
                seeds=[0] * requests,
                pages=pages,
                tables=self._tables(first, slots) if pages else inputs.block_tables[:requests],
                most=self._most,
            )
        )
        if drafted.parents is not None or drafted.probs is not None or drafted.counts is not None:
            raise ValueError("only plain chains are drafted on the device")
        tokens = drafted.tokens[:, : width - 1].clamp(0, self.resident.vocab_size - 1)
        inputs.drafts[: requests * (width - 1)] = tokens.flatten()

    def _batch(self, rows: int) -> AttentionBatch:
        """What was verified, for the resident's layers: the same tokens in the same slots."""
        lens = np.ones(rows, dtype=np.int32)
        return self.inputs.batch(lens, lens * self._most, spread=True)

    def _tables(self, first: Tensor, slots: Tensor) -> Tensor:
        """Block tables with scratch behind the pages of the last row that each request may have."""
        inputs, size = self.inputs, self.inputs.page_size
        assert self.resident.pages is not None, "there is a draft pool"
        scratch = self.resident.pages.scratch
        ends = inputs.seq_lens[: len(first) * self.width].view(len(first), self.width).amax(1)
        own = -(-ends // size)  # pages that the step had
        width = inputs.block_tables.shape[1]
        at = torch.arange(width + scratch.shape[1], device=slots.device)
        known = inputs.tables[slots.clamp(max=len(inputs.tables) - 1)][:, at.clamp(max=width - 1)]
        spare = scratch[slots].gather(1, (at - own[:, None]).clamp(0, scratch.shape[1] - 1))
        return torch.where(at < own[:, None], known, spare)


def agreeing(sampled: Tensor, drafts: Tensor) -> Tensor:
    """How many drafts of each request the target's own samples begin with, int64 [R].

    Args:
        sampled: int32 [R, K + 1], behind the newest token and behind each draft; `UNSAMPLED` where there is none.
        drafts: int64 [R, K].
    """
    agree = (sampled[:, :-1] == drafts) & (sampled[:, 1:] != UNSAMPLED)
    return agree.int().cumprod(1).sum(1)


__all__ = ["MOST_ROWS", "DeviceDrafting", "DeviceDrafts", "agreeing"]
