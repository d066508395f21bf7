"""Runs one step on one device: inputs, forward pass, sampling. Lives on the executor's thread.

Keeps the tokens and the block table of every slot, so that the token sampled in one step is the input of the next
without a way over the scheduler. Knows no request, no queue and no page that it was not told of.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.batch import Admission, Entry, EntryResult, StepBatch, StepResult
from engine.grammars import Grammars
from engine.latent.up import LatentUp
from engine.masking import UNMASKED, Masking, SlotMasks
from engine.sampler import Row, sample, top_logprobs
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBackend, AttentionBatch
from engine.specs.model import Forward, Model
from engine.specs.speculator import TargetTaps
from engine.trace import Tracer
from engine.verifier import accept_equal, verify_chain

KVPool = Sequence[tuple[Tensor, ...]]
"""Per layer, the parts that the attention backend's layout names, each [num_pages, …]."""


@dataclass(slots=True)
class Slot:
    """What a slot's request is sampled with."""

    admission: Admission
    bannable: tuple[int, ...]


class StepForward(Forward):
    """Binds a model's attention calls to this step's plan and pages."""

    def __init__(self, backend: AttentionBackend, pool: KVPool, taps: TargetTaps) -> None:
        self._forward, self._forward_latent, self._pool = backend.forward, backend.forward_latent, pool
        self._wanted = frozenset(taps.hidden_layers)
        self.plan: Any = None
        self.tapped: list[Tensor] = []

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        return self._forward(layer, q, k, v, self._pool[layer], self.plan)

    def attend_latent(self, layer: int, q: Tensor, rows: Tensor, up: LatentUp) -> Tensor:
        return self._forward_latent(layer, q, rows, up, self._pool[layer], self.plan)

    def tap(self, layer: int, hidden: Tensor) -> None:
        if layer in self._wanted:
            self.tapped.append(hidden.clone())


class Runner:
    """One rank.

    Args:
        max_len: most tokens of one request, drafts included.
        taps: what a speculator wants to see; hidden states then come with the results.
        grammars: compiles the constraints of requests; None if there are none.
        tracer: is told when inputs are packed, and when the device computes and samples.
    """

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        pool: KVPool,
        *,
        page_size: int,
        slots: int,
        max_len: int,
        device: torch.device,
        taps: TargetTaps | None = None,
        grammars: Grammars | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.model, self.backend, self.device, self.page_size = model, backend, device, page_size
        self.taps = taps or TargetTaps()
        self._step = StepForward(backend, pool, self.taps)
        self._tokens = np.zeros((slots, max_len + 1), dtype=np.int64)
        self._tables = np.zeros((slots, -(-max_len // page_size) + 1), dtype=np.int32)
        self._slots: list[Slot | None] = [None] * slots
        self._masking = Masking(grammars, device)
        self.tracer = tracer or Tracer()

    def launch(self, batch: StepBatch) -> Callable[[], StepResult]:
        """Start one step; what is returned waits for it. Steps run in the order of their launch."""
        result = self.step(batch)
        return lambda: result

    @torch.inference_mode()
    def step(self, batch: StepBatch) -> StepResult:
        """Compute one step; its entries with one token come first."""
        for admission in batch.admissions:
            self._admit(admission)
        for entry in batch.entries:
            self._place(entry)
        return self._compute(batch.entries, batch.number) if batch.entries else StepResult([])

    def improve(self) -> bool:
        """Called between steps while it returns True: do a little that makes later steps faster, tokens unchanged."""
        return False

    def _compute(self, entries: Sequence[Entry], number: int = 0) -> StepResult:
        with self.tracer.span("runner", "pack", number):
            self._masking.begin(entries, self._tokens)  # on a thread, while the forward pass runs
            tokens, positions, attention = self._inputs(entries)
            self._step.plan, self._step.tapped = self.backend.plan(attention), []
        with self.tracer.span("device", "step", number):
            with self.tracer.span("device", "forward", number):
                hidden = self.model.forward(tokens, positions, self._step)
            with self.tracer.span("device", "sample", number):
                return self._finish(entries, hidden)

    def warm_up(self) -> None:
        """Compute a short prompt and a decode step on page 0, which nothing holds yet: libraries allocate and tune on
        first use."""
        params = SamplingParams(temperature=0.0)
        count = min(self.page_size, self._tokens.shape[1] - 2)
        admission = Admission(slot=0, tokens=[0] * count, prompt_len=count, params=params, seed=0, stop_ids=())
        pages = [0] * (-(-(count + 1) // self.page_size))
        for start, length in ((0, count), (count, 1)):
            entry = Entry(slot=0, start=start, count=length, samples=True, first_page=0, new_pages=pages)
            self.step(StepBatch(number=0, admissions=[] if start else [admission], entries=[entry]))

    def _admit(self, admission: Admission) -> None:
        self._tokens[admission.slot, : len(admission.tokens)] = admission.tokens
        bannable = admission.stop_ids if admission.params.min_tokens else ()
        self._slots[admission.slot] = Slot(admission, bannable)
        self._masking.admit(admission)

    def _admission(self, slot: int) -> Admission:
        held = self._slots[slot]
        assert held is not None, "a scheduled slot was admitted"
        return held.admission

    def _place(self, entry: Entry) -> None:
        """Take in the pages and drafts of an entry."""
        if entry.new_pages:
            end = entry.first_page + len(entry.new_pages)
            self._tables[entry.slot, entry.first_page : end] = entry.new_pages
        if entry.drafts:
            end = entry.start + entry.count
            self._tokens[entry.slot, end - len(entry.drafts) : end] = entry.drafts

    def _inputs(self, entries: Sequence[Entry]) -> tuple[Tensor, Tensor, AttentionBatch]:
        """The ragged batch as tensors: token ids [T], positions [T], and what attention needs."""
        slots = np.array([e.slot for e in entries])
        starts = np.array([e.start for e in entries], dtype=np.int64)
        lens = np.array([e.count for e in entries], dtype=np.int32)
        ends = np.concatenate(([0], np.cumsum(lens))).astype(np.int32)
        owner = np.repeat(np.arange(len(entries)), lens)
        positions = np.arange(ends[-1]) - ends[owner] + starts[owner]
        seq_lens = (starts + lens).astype(np.int32)
        tables = self._tables[slots, : -(-int(seq_lens.max()) // self.page_size)]
        rows = slots[owner]
        pages = self._tables[rows, positions // self.page_size].astype(np.int64)
        slot_mapping = pages * self.page_size + positions % self.page_size
        attention = AttentionBatch(
            query_start=self._put(ends),
            seq_lens=self._put(seq_lens),
            block_tables=self._put(tables),
            slot_mapping=self._put(slot_mapping),
            positions=self._put(positions),
            num_decodes=int((lens == 1).sum()),
            query_lens_host=lens,
            seq_lens_host=seq_lens,
        )
        return self._put(self._tokens[rows, positions]), attention.positions, attention

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _finish(self, entries: Sequence[Entry], hidden: Tensor) -> StepResult:
        """Sample what is to be sampled, and write it where the next step reads its input."""
        ends = np.cumsum([e.count for e in entries])
        results = [EntryResult() for _ in entries]
        for entry, result, end in zip(entries, results, ends, strict=True):
            if entry.prompt_logprobs is not None:
                result.prompt_logprobs = self._prompt_logprobs(entry, hidden[end - entry.count : end])
        sampling = [i for i, e in enumerate(entries) if e.samples]
        if not sampling:
            return StepResult(results)
        wanted = np.concatenate([np.arange(ends[i] - len(entries[i].drafts) - 1, ends[i]) for i in sampling])
        every = len(wanted) == len(hidden)
        logits = self.model.logits(hidden if every else hidden[self._put(wanted)])
        finite = torch.isfinite(logits.sum(-1)).tolist()
        self._sample(entries, sampling, logits, finite, results)
        if self._step.tapped or self.taps.final_hidden:
            self._report_hidden(entries, hidden, ends, results)
        return StepResult(results)

    def _sample(
        self,
        entries: Sequence[Entry],
        sampling: Sequence[int],
        logits: Tensor,
        finite: Sequence[bool],
        results: Sequence[EntryResult],
    ) -> None:
        masks = self._masking.finish()
        rows = [row for i in sampling for row in self._rows(entries[i], masks.get(entries[i].slot, UNMASKED))]
        chains = [entries[i] for i in sampling if entries[i].draft_probs is not None]
        raw = logits.clone() if any(r.params.logprobs is not None and r.reshaped for r in rows) else logits
        own = logits.clone() if chains and any(r.reshaped for r in rows) else logits
        sampled = sample(logits, rows)
        at = 0
        for i in sampling:
            entry, result = entries[i], results[i]
            n = len(entry.drafts) + 1
            if not all(finite[at : at + n]):
                result.failed = True
            elif fault := masks.get(entry.slot, UNMASKED).fault:
                result.failed, result.fault = True, fault
            elif entry.draft_probs is not None:
                result.tokens = verify_chain(own[at : at + n], rows[at : at + n], entry.drafts, entry.draft_probs)
            else:
                result.tokens = accept_equal(sampled[at : at + n], entry.drafts)
            if (count := rows[at].params.logprobs) is not None:
                m = len(result.tokens)
                result.logprobs = top_logprobs(raw[at : at + m], result.tokens, [count] * m)
            first = entry.start + entry.count - len(entry.drafts)
            self._tokens[entry.slot, first : first + len(result.tokens)] = result.tokens
            at += n

    def _rows(self, entry: Entry, masks: SlotMasks) -> list[Row]:
        """How to sample after the entry's last token and after each of its drafts."""
        slot = self._slots[entry.slot]
        assert slot is not None, "a scheduled slot was admitted"
        admission = slot.admission
        first = entry.start + entry.count - len(entry.drafts)
        return [
            Row(
                admission.params,
                admission.seed,
                position,
                self._tokens[entry.slot, :position],
                admission.prompt_len,
                slot.bannable if position - admission.prompt_len < admission.params.min_tokens else (),
                masks.row(position - first),
            )
            for position in range(first, first + len(entry.drafts) + 1)
        ]

    def _prompt_logprobs(self, entry: Entry, hidden: Tensor) -> list[Any]:
        """Log-probabilities of the prompt tokens that follow the computed ones, a slice of rows at a time."""
        count = min(entry.count, self._admission(entry.slot).prompt_len - 1 - entry.start)
        following = self._tokens[entry.slot, entry.start + 1 : entry.start + 1 + count].tolist()
        found: list[Any] = []
        for at in range(0, count, 64):
            ids = following[at : at + 64]
            logits = self.model.logits(hidden[at : at + len(ids)])
            found += top_logprobs(logits, ids, [entry.prompt_logprobs or 0] * len(ids))
        return found

    def _report_hidden(
        self, entries: Sequence[Entry], final: Tensor, ends: np.ndarray, results: Sequence[EntryResult]
    ) -> None:
        """Hand each entry its rows of the tapped states: [rows, taps, hidden], rejected drafts left out."""
        states = [*self._step.tapped, *([final] if self.taps.final_hidden else [])]
        stacked = torch.stack(states, 1)
        for entry, result, end in zip(entries, results, ends, strict=True):
            kept = entry.count - len(entry.drafts) + max(len(result.tokens) - 1, 0)
            result.hidden = stacked[end - entry.count : end - entry.count + kept]


__all__ = ["KVPool", "Runner", "StepForward"]
