"""The runner of a CUDA device: nothing on the step waits for the device, and decodes run as captured graphs.

Keeps on the device what the next step needs (the tokens sampled last, the block tables), as a copy of what the host
keeps that is brought up to date when it is used. A step whose requests ask for what only the host's sampler knows
(penalties, grammars, log-probabilities, drafts) goes the way of `engine.runner`; both ways may alternate.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Admission, Entry, EntryResult, StepBatch, StepResult
from engine.cuda.drafted_steps import DraftedSteps
from engine.cuda.drafts import DeviceDrafting
from engine.cuda.graphs import Graphs, ladder
from engine.cuda.inputs import GREEDY, IN_FLIGHT, RowInputs, StepInputs, sampling_fields
from engine.cuda.sampling import BAD, sample
from engine.errors import ResourceError
from engine.runner import WORTH_DROPPING, Runner
from engine.sampling_params import SamplingParams

Result = Callable[[], StepResult]

Tensors = tuple[Tensor, Tensor]
"""Hidden states [T, hidden] and logits float32 [R, vocab]; valid until the next run."""

SPREAD = (8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Tokens of steps that aren't decodes alone, but so short that each token may be computed as a decode of its own."""

SPREAD_KEYS = 2**17
"""Keys that the tokens of such prefills may read in all, for each reads them by itself."""


LEAST_SHARED = 16
"""Decodes of the smallest graph in which the attention backend looks for prefixes that they share."""

SHARED_KEYS = 256
"""Keys that decodes must share to be looked at."""

SPARED_KEYS = 2**14
"""Keys that are not read twice, from which on looking for them pays."""


@dataclass(slots=True)
class Sampled:
    """Tokens on their way to the host."""

    arrived: torch.cuda.Event | None  # None where there is nothing to wait for
    buffer: Tensor  # int32 [N], pinned
    rows: np.ndarray  # of the entries
    slots: np.ndarray  # of the entries, and which request of the slot this is
    generations: np.ndarray
    positions: np.ndarray  # of the tokens; -1 where none is sampled
    read: np.ndarray | None = None

    def tokens(self) -> np.ndarray:
        """Wait, then read; may be called from any thread, and again."""
        if self.read is None:
            if self.arrived is not None:
                self.arrived.synchronize()
            self.read = self.buffer.numpy()[self.rows]
        return self.read


class CudaRunner(Runner):
    """One rank on CUDA. All its work goes to a stream of its own.

    Args:
        token_budget: most tokens of one step.
        graphs: capture decodes; the attention backend and the model must be safe for it.
        others: see `Runner`.
    """

    def __init__(self, *args: Any, token_budget: int, graphs: bool, **others: Any) -> None:
        super().__init__(*args, **others)
        slots, max_pages = self._tables.shape
        self._on_cuda = self.device.type == "cuda"
        if self._on_cuda:
            stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            stream.wait_stream(torch.cuda.current_stream())
            torch.cuda.set_stream(stream)  # of this thread, which is the runner's
        max_rows = max(slots, SPREAD[-1])
        self._inputs_on_device = StepInputs(
            slots=slots,
            max_rows=max_rows,
            max_tokens=max(token_budget, max_rows, self.page_size),
            max_pages=max_pages,
            page_size=self.page_size,
            device=self.device,
        )
        self._sampled = torch.zeros(max_rows, dtype=torch.int32, device=self.device)
        self._outs = [torch.zeros(max_rows, dtype=torch.int32, pin_memory=self._on_cuda) for _ in range(IN_FLIGHT + 1)]
        self._underway: deque[Sampled] = deque()
        self._launches = 0
        self._plain = [False] * slots
        self._greedy = np.zeros(slots, dtype=bool)
        self._generation = np.zeros(slots, dtype=np.int64)
        self._host_pages = np.zeros(slots, dtype=np.int32)  # pages of each slot that the host knows, and the device
        self._device_pages = np.zeros(slots, dtype=np.int32)
        self._device_position = np.full(slots, -1)  # position of the token that the device sampled last
        self._max_len = self._tokens.shape[1] - 1
        self._decodes: Graphs[Tensors] | None = None
        self._spread: Graphs[Tensors] | None = None
        self._shared: Graphs[Tensors] | None = None
        graph_memory: Any = None
        if graphs and self._on_cuda:
            memory = torch.cuda.graph_pool_handle()
            self._decodes = Graphs(self._decode, ladder(slots), memory)
            self._spread = Graphs(partial(self._decode, spread=True), list(SPREAD), memory)
            graph_memory = memory
            if self.backend.reads_shared_once:
                sizes = [size for size in ladder(slots)[:-1] if size >= LEAST_SHARED][::2]  # each takes a while
                self._shared = Graphs(partial(self._decode, shared=True), [*sizes, slots], memory)
        self._drafted: DraftedSteps | None = None
        if self.resident and self.resident.chain:
            drafting = DeviceDrafting(
                self._inputs_on_device,
                self.resident,
                self._verify_rows,
                self._sampled,
                slots=slots,
                most=self._max_len,
                graphs=graph_memory,
            )
            self._drafted = DraftedSteps(drafting, self._row_inputs, self._tokens, self._tables, self._admission)

    # Steps

    @torch.inference_mode()
    def launch(self, batch: StepBatch) -> Result:
        """Queue one step on the device; what is returned waits for it."""
        if self._drafted:
            self._drafted.settle()
        for admission in batch.admissions:
            self._admit(admission)
        for entry in batch.entries:
            if entry.new_pages or entry.drafts:
                self._place(entry)
        self._settle(wait=False)
        entries = batch.entries
        if not entries:
            return lambda: StepResult([])
        if all(self._is_plain(entry) for entry in entries):
            with self.tracer.span("runner", "pack", batch.number), self.tracer.span("device", "step", batch.number):
                return self._launch(entries)
        self._settle(wait=True)
        if self._drafted and (pending := self._launch_drafted(self._drafted, entries, batch.number)) is not None:
            return pending
        result = self._speculate(entries, batch.number)
        for entry in entries:
            self._device_position[entry.slot] = -1
        return lambda: result

    def _launch_drafted(self, steps: DraftedSteps, entries: Sequence[Entry], number: int) -> Result | None:
        """Queue a step whose drafts stay on the device; None if it can't be one."""
        if not all(self._plain[e.slot] for e in entries) or not steps.fit(entries):
            return None
        with self.tracer.span("runner", "pack", number), self.tracer.span("device", "step", number):
            pending = steps.launch(entries)
        slots = [entry.slot for entry in entries]
        if pending is not None:
            self._device_pages[slots] = self._host_pages[slots]
        self._device_position[slots] = -1
        return pending

    def step(self, batch: StepBatch) -> StepResult:
        """Compute one step and wait for it."""
        return self.launch(batch)()

    @torch.inference_mode()
    def improve(self) -> bool:
        """Capture one more graph; True while some are missing. Steps go the slow way until theirs is there."""
        for graphs in (self._decodes, self._spread, self._shared):
            if graphs is None or (size := graphs.next) is None:
                continue
            try:
                self._inputs_on_device.send_padding(size)
                self._decode(size, spread=graphs is self._spread, shared=graphs is self._shared)
                graphs.capture_next()
            except torch.OutOfMemoryError:
                graphs.give_up()  # the eager way needs no memory that stays
                torch.cuda.empty_cache()
            return True
        return self._drafted is not None and self._drafted.drafting.improve()

    def _admit(self, admission: Admission) -> None:
        super()._admit(admission)
        slot = admission.slot
        self._plain[slot], self._greedy[slot] = _is_plain(admission.params), admission.params.greedy
        self._generation[slot] += 1
        self._host_pages[slot] = self._device_pages[slot] = 0
        self._device_position[slot] = -1
        if self._drafted:
            self._drafted.forget(slot)

    def _place(self, entry: Entry) -> None:
        super()._place(entry)
        if entry.new_pages:
            self._host_pages[entry.slot] = entry.first_page + len(entry.new_pages)
            self._device_pages[entry.slot] = min(self._device_pages[entry.slot], entry.first_page)

    def _is_plain(self, entry: Entry) -> bool:
        tapped = self.resident is None and (self.taps.hidden_layers or self.taps.final_hidden)
        drafted = entry.drafts or entry.draft_slots or entry.follow
        return self._plain[entry.slot] and not drafted and not tapped

    def _settle(self, *, wait: bool) -> None:
        """Write tokens that have arrived into the host's table; with `wait` all of them."""
        while self._underway and (wait or len(self._underway) >= IN_FLIGHT or self._is_back(self._underway[0])):
            sampled = self._underway.popleft()
            tokens, slots, positions = sampled.tokens(), sampled.slots, sampled.positions
            there = (positions >= 0) & (tokens >= 0) & (sampled.generations == self._generation[slots])
            self._tokens[slots[there], positions[there]] = tokens[there]

    @staticmethod
    def _is_back(sampled: Sampled) -> bool:
        return sampled.read is not None or sampled.arrived is None or bool(sampled.arrived.query())  # type: ignore[no-untyped-call]

    # The way without the host

    def _launch(self, entries: Sequence[Entry]) -> Result:
        try:
            rows = self._run(entries)
        except torch.OutOfMemoryError as error:
            return self._launch_halves(entries, error)
        out = self._outs[self._launches % len(self._outs)][: int(rows[-1]) + 1]
        self._launches += 1
        out.copy_(self._sampled[: len(out)], non_blocking=True)
        arrived = None
        if self._on_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        slots, starts, ends, samples = _columns(entries)
        if self.resident:
            self.resident.pass_by(slots, starts, ends)
        sampled = Sampled(arrived, out, rows, slots, self._generation[slots], np.where(samples, ends, -1))
        self._underway.append(sampled)
        return lambda: StepResult(_results(entries, sampled.tokens().tolist()))

    def _launch_halves(self, entries: Sequence[Entry], error: Exception) -> Result:
        """The device has no memory for so many tokens: compute half of them at a time."""
        torch.cuda.empty_cache()
        if len(entries) > 1:
            middle = len(entries) // 2
            parts = [self._launch(half)().entries for half in (entries[:middle], entries[middle:])]
            return lambda: StepResult([*parts[0], *parts[1]])
        (entry,) = entries
        if entry.count < 2:
            raise ResourceError(
                "the device has no memory left for a step of one token; lower kv_cache.memory or scheduler.max_running"
            ) from error
        half = entry.count // 2
        self._launch([replace(entry, count=half, samples=False)])()
        return self._launch([replace(entry, start=entry.start + half, count=entry.count - half)])

    def _run(self, entries: Sequence[Entry]) -> np.ndarray:
        """Forward pass and sampling; returns the row of each entry."""
        slots, starts, ends, samples = _columns(entries)
        counts = ends - starts
        tokens, decodes = int(counts.sum()), int(counts.max()) == 1
        keys = int((counts * ends)[counts > 1].sum())
        shared = decodes and self.backend.reads_shared_once and self._shares(slots, ends)
        captured = [self._shared] * shared + [self._decodes] if decodes else [self._spread] * (keys <= SPREAD_KEYS)
        fitting = ((graphs, graphs.size_for(tokens)) for graphs in captured if graphs)
        graphs, size = next((pair for pair in fitting if pair[1] is not None), (None, None))
        spread = size is not None and not decodes
        self._inputs_on_device.send(self._row_inputs(slots, starts, ends, samples), size or len(slots), spread=spread)
        self._device_pages[slots] = self._host_pages[slots]
        self._device_position[slots] = np.where(samples, ends, -1)
        if graphs and size:
            graphs.replay(size)
        else:
            self._forward(counts.astype(np.int32), ends.astype(np.int32), every=decodes, shared=shared or not decodes)
        return np.cumsum(counts) - 1 if spread else np.arange(len(slots))

    def _row_inputs(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray, samples: np.ndarray) -> RowInputs:
        known, wanted = self._device_pages[slots], self._host_pages[slots]
        from_host = (ends - starts != 1) | (starts != self._device_position[slots])
        sampling = np.zeros((len(slots), len(GREEDY)), dtype=np.int32)
        sampling[samples] = GREEDY
        for row in np.flatnonzero(samples & ~self._greedy[slots]):
            admission = self._admission(slots[row])
            sampling[row] = sampling_fields(admission.params, admission.seed, int(ends[row]))
        return RowInputs(
            slots=slots,
            starts=starts,
            counts=ends - starts,
            first_pages=known,
            pages={r: self._tables[slots[r], known[r] : wanted[r]] for r in np.flatnonzero(known < wanted).tolist()},
            ids={r: self._tokens[slots[r], starts[r] : ends[r]] for r in np.flatnonzero(from_host).tolist()},
            sampling=sampling,
        )

    def _shares(self, slots: np.ndarray, ends: np.ndarray) -> bool:
        """Whether so many decodes begin with the same pages that reading those once pays."""
        at = -(-SHARED_KEYS // self.page_size)
        slots = slots[ends > at * self.page_size]
        if len(slots) < 2:
            return False
        pages, counts = np.unique(self._tables[slots, at - 1], return_counts=True)
        members = slots[self._tables[slots, at - 1] == pages[counts.argmax()]]
        if len(members) < 2:
            return False
        most = int(self._host_pages[members].min())
        tables = self._tables[members, :most]
        alike = (tables == tables[0]).all(0)
        pages_alike = most if alike.all() else int(alike.argmin())
        return (len(members) - 1) * pages_alike * self.page_size >= SPARED_KEYS

    def _forward(
        self,
        lens: np.ndarray,
        ends: np.ndarray,
        *,
        every: bool,
        spread: bool = False,
        shared: bool = True,
        tapping: bool = False,
    ) -> Tensors:
        inputs, rows, tokens = self._inputs_on_device, len(lens), int(lens.sum())
        inputs.prepare(rows)
        batch = inputs.batch(lens, ends, spread=spread, may_share=shared)
        last = inputs.last_index[:rows]
        kept = None if every or tapping or tokens - rows < WORTH_DROPPING else last
        self._step.begin(self.backend.plan(batch), tapping=tapping, kept=kept)
        hidden = self.model.forward(inputs.tokens[:tokens], inputs.positions[:tokens], self._step)
        logits = self.model.scores(hidden if every or self._step.dropped else hidden[last])
        sample(logits, inputs.packed, inputs.last_tokens, self._sampled)
        return hidden, logits

    def _verify_rows(self, rows: int) -> list[Tensor]:
        """Compute and sample rows that were sent; returns the states that the resident taps."""
        ones = np.ones(rows, dtype=np.int32)
        hidden, _ = self._forward(ones, ones * self._max_len, every=True, spread=True, tapping=True)
        return [*self._step.tapped, *([hidden] if self.taps.final_hidden else [])]

    def _decode(self, size: int, *, spread: bool = False, shared: bool = False) -> Tensors:
        """What a graph of `size` decodes holds, of whatever lengths."""
        ones = np.ones(size, dtype=np.int32)
        return self._forward(ones, ones * self._max_len, every=True, spread=spread, shared=shared or spread)


def _is_plain(p: SamplingParams) -> bool:
    """Whether the device's sampler knows everything that a request asks for."""
    penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
    chosen = p.logit_bias or p.allowed_token_ids or p.bad_word_ids or p.min_tokens or p.structured is not None
    return not (penalized or chosen or p.logprobs is not None or p.prompt_logprobs is not None)


def _columns(entries: Sequence[Entry]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slots, first positions, positions after the last, and who samples."""
    slots = np.array([entry.slot for entry in entries])
    starts = np.array([entry.start for entry in entries])
    counts = np.array([entry.count for entry in entries])
    return slots, starts, starts + counts, np.array([entry.samples for entry in entries])


def _results(entries: Sequence[Entry], tokens: Sequence[int]) -> list[EntryResult]:
    found = [EntryResult([t] if e.samples else []) for e, t in zip(entries, tokens, strict=True)]
    for result, token in zip(found, tokens, strict=True):
        if token == BAD:
            result.tokens, result.failed = [], True
    return found


__all__ = ["CudaRunner"]
