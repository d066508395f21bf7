"""Runs one step on one device: inputs, forward pass, sampling. Lives on the executor's thread.

Keeps the tokens and the block table of every slot, so that the token sampled in one step is the input of the next
without a way over the scheduler. Knows no request, no queue and no page that it was not told of.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.batch import Admission, Entry, EntryResult, StepBatch, StepResult
from engine.grammars import Grammars
from engine.kv_moves import KVMoves
from engine.latent.up import LatentUp
from engine.masking import UNMASKED, Masking, SlotMasks
from engine.resident.driver import Computed, Resident
from engine.resident.parts import ResidentParts
from engine.rows import Slot, rows_of
from engine.sampler import Row, maxima, top_logprobs
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBackend, AttentionBatch, Rotation
from engine.specs.model import Forward, Model
from engine.specs.speculator import Draft, TargetTaps
from engine.trace import Tracer
from engine.trees import best_chain, depths, mask
from engine.verifier import Verified, verify

KVPool = Sequence[tuple[Tensor, ...]]
"""Per layer, the parts that the attention backend's layout names, each [num_pages, …]."""

WORTH_DROPPING: Final = 128
"""Rows of a step without which its last layer is noticeably cheaper."""


class StepForward(Forward):
    """Binds a model's attention calls to this step's plan and pages."""

    def __init__(self, backend: AttentionBackend, pool: KVPool, taps: TargetTaps) -> None:
        self._forward, self._forward_latent, self._pool = backend.forward, backend.forward_latent, pool
        self._forward_rotated = backend.forward_rotated
        self._tapped_layers = self._wanted = frozenset(taps.hidden_layers)
        self.plan: Any = None
        self.tapped: list[Tensor] = []
        self._kept: Tensor | None = None
        self.dropped = False

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        return self._forward(layer, q, k, v, self._pool[layer], self.plan)

    def attend_rotated(self, layer: int, q: Tensor, k: Tensor, v: Tensor, rotation: Rotation) -> Tensor:
        return self._forward_rotated(layer, q, k, v, self._pool[layer], self.plan, rotation)

    def attend_latent(self, layer: int, q: Tensor, rows: Tensor, up: LatentUp) -> Tensor:
        return self._forward_latent(layer, q, rows, up, self._pool[layer], self.plan)

    @property
    def tapping(self) -> bool:
        """Whether this step shows hidden states to somebody."""
        return bool(self._wanted)

    def begin(self, plan: Any, *, tapping: bool, kept: Tensor | None = None) -> None:
        """Another step; `kept`, int64 [N], are the rows whose final states are wanted, all if None."""
        self.plan, self.tapped, self._kept, self.dropped = plan, [], kept, False
        self._wanted = self._tapped_layers if tapping else frozenset()

    def keep(self, rows: Tensor) -> Tensor:
        if self._kept is None:
            return rows
        self.dropped = True
        return rows[self._kept]

    def tap(self, layer: int, hidden: Tensor) -> None:
        if layer in self._wanted:
            self.tapped.append(hidden.clone())


class Runner:
    """One rank.

    Args:
        max_len: most tokens of one request, drafts included.
        taps: what a speculator wants to see; hidden states then come with the results.
        resident: the speculator that lives here, loaded, and its KV.
        moves: moves the KV of single tokens, if it can be and the backend knows trees; else trees become chains.
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
        resident: ResidentParts | None = None,
        moves: KVMoves | None = None,
        grammars: Grammars | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.model, self.backend, self.device, self.page_size = model, backend, device, page_size
        self.taps = taps or (resident.plan.taps if resident else TargetTaps())
        self._step = StepForward(backend, pool, self.taps)
        self._tokens = np.zeros((slots, max_len + 1), dtype=np.int64)
        self._tables = np.zeros((slots, -(-max_len // page_size) + 1), dtype=np.int32)
        self._slots: list[Slot | None] = [None] * slots
        self._moves = moves
        self.resident: Resident | None = None
        if resident:
            self.resident = resident.join(self._tokens, self._tables, trees=moves is not None, device=device)
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
        return self._speculate(batch.entries, batch.number) if batch.entries else StepResult([])

    def improve(self) -> bool:
        """Called between steps while it returns True: do a little that makes later steps faster, tokens unchanged."""
        return False

    def _speculate(self, entries: Sequence[Entry], number: int) -> StepResult:
        """Compute a step whose drafts are verified here, and some of which may be drafted here."""
        entries = [self._as_chain(entry) for entry in entries]
        if self.resident is None or not any(entry.follow or entry.draft_slots for entry in entries):
            return self._compute(entries, number)
        with self.tracer.span("device", "draft", number):
            entries = self.resident.draft(entries)
        for entry in entries:
            self._place(entry)
        order = sorted(range(len(entries)), key=lambda i: entries[i].count > 1)
        found = self._compute([entries[i] for i in order], number)
        account = self.resident.account()
        results = [result for _, result in sorted(zip(order, found.entries, strict=True), key=lambda pair: pair[0])]
        return StepResult(results, account.fault, account.seconds)

    def _as_chain(self, entry: Entry) -> Entry:
        """The entry without forks in its draft, if they can't be verified here."""
        if entry.draft_parents is None or self._moves is not None:
            return entry
        chain = best_chain(Draft(entry.drafts, entry.draft_parents, entry.draft_probs))
        kept = replace(
            entry,
            count=entry.count - len(entry.drafts) + len(chain.tokens),
            drafts=chain.tokens,
            draft_parents=None,
            draft_probs=chain.probs,
        )
        self._place(kept)
        return kept

    def _compute(self, entries: Sequence[Entry], number: int = 0) -> StepResult:
        with self.tracer.span("runner", "pack", number):
            self._masking.begin(entries, self._tokens)  # on a thread, while the forward pass runs
            tokens, positions, attention = self._inputs(entries)
            tapping = self.resident is None or any(entry.follow for entry in entries)
            self._step.begin(self.backend.plan(attention), tapping=tapping, kept=self._kept(entries))
        with self.tracer.span("device", "step", number):
            with self.tracer.span("device", "forward", number):
                hidden = self._states(tokens, positions)
            with self.tracer.span("device", "sample", number):
                return self._finish(entries, hidden)

    def _kept(self, entries: Sequence[Entry]) -> Tensor | None:
        """The last row of each entry and those of its drafts, if nobody looks at the others and they are many."""
        seen = self.resident or self.taps.final_hidden or self.taps.hidden_layers
        counts = np.array([entry.count for entry in entries])
        kept = np.array([_sampled_from(entry) for entry in entries])
        asked = any(entry.prompt_logprobs is not None for entry in entries)
        if seen or asked or counts.sum() - kept.sum() < WORTH_DROPPING:
            return None
        return self._put(last_rows(np.cumsum(counts), kept))

    def _states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """The model's hidden states [T, hidden]; what is tapped on the way stands in the step."""
        return self.model.forward(tokens, positions, self._step)

    def _finite(self, logits: Tensor) -> list[bool]:
        """Whether all of each row's logits are finite."""
        finite: list[bool] = torch.isfinite(logits.sum(-1)).tolist()
        return finite

    def _best(self, logits: Tensor) -> list[int]:
        """The most likely token of each row."""
        return maxima(logits)

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
        if self.resident:
            self.resident.admit(admission)

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
        places = np.arange(ends[-1]) - ends[owner] + starts[owner]
        seq_lens = (starts + lens).astype(np.int32)
        tables = self._tables[slots, : -(-int(seq_lens.max()) // self.page_size)]
        rows = slots[owner]
        pages = self._tables[rows, places // self.page_size].astype(np.int64)
        slot_mapping = pages * self.page_size + places % self.page_size
        positions, trees = places.copy(), dict[int, Tensor]()
        for i, entry in enumerate(entries):
            if entry.draft_parents is not None:
                plain = entry.count - len(entry.drafts)
                positions[ends[i] + plain : ends[i + 1]] = entry.start + plain + np.array(depths(entry.draft_parents))
                trees[i] = mask(plain, entry.draft_parents).to(self.device)
        attention = AttentionBatch(
            query_start=self._put(ends),
            seq_lens=self._put(seq_lens),
            block_tables=self._put(tables),
            slot_mapping=self._put(slot_mapping),
            positions=self._put(positions),
            num_decodes=int((lens == 1).sum()),
            query_lens_host=lens,
            seq_lens_host=seq_lens,
            tree_masks=trees or None,
        )
        return self._put(self._tokens[rows, places]), attention.positions, attention

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device, non_blocking=True)

    def _finish(self, entries: Sequence[Entry], hidden: Tensor) -> StepResult:
        """Sample what is to be sampled, and write it where the next step reads its input."""
        ends = np.cumsum([_sampled_from(e) if self._step.dropped else e.count for e in entries])
        results = [EntryResult() for _ in entries]
        for entry, result, end in zip(entries, results, ends, strict=True):
            if entry.prompt_logprobs is not None:
                result.prompt_logprobs = self._prompt_logprobs(entry, hidden[end - entry.count : end])
        sampling = [i for i, e in enumerate(entries) if e.samples]
        paths = self._verify(entries, sampling, hidden, ends, results) if sampling else {}
        if self.resident:
            self._follow(entries, hidden, ends, results, paths)
        elif self._step.tapped or self.taps.final_hidden:
            self._report_hidden(entries, hidden, ends, results)
        return StepResult(results)

    def _verify(
        self,
        entries: Sequence[Entry],
        sampling: Sequence[int],
        hidden: Tensor,
        ends: np.ndarray,
        results: Sequence[EntryResult],
    ) -> dict[int, list[int]]:
        """Sample; returns the accepted nodes of each entry that samples."""
        wanted = last_rows(ends[sampling], np.array([_sampled_from(entries[i]) for i in sampling]))
        every = len(wanted) == len(hidden)
        logits = self.model.logits(hidden if every else hidden[self._put(wanted)])
        finite = self._finite(logits)
        found = self._sample(entries, sampling, logits, finite, results)
        if self._moves is not None:
            self._moves.settle([(entries[i], one.path) for i, one in found.items()], self._tables)
        return {i: one.path for i, one in found.items()}

    def _follow(
        self,
        entries: Sequence[Entry],
        final: Tensor,
        ends: np.ndarray,
        results: Sequence[EntryResult],
        paths: Mapping[int, Sequence[int]],
    ) -> None:
        """Show the resident what was computed."""
        assert self.resident is not None, "asked only with one"
        computed = [
            Computed(entry, int(end) - entry.count, paths.get(i, ()), not result.failed)
            for i, (entry, result, end) in enumerate(zip(entries, results, ends, strict=True))
        ]
        self.resident.follow(computed, [*self._step.tapped, *([final] if self.taps.final_hidden else [])])

    def _sample(
        self,
        entries: Sequence[Entry],
        sampling: Sequence[int],
        logits: Tensor,
        finite: Sequence[bool],
        results: Sequence[EntryResult],
    ) -> dict[int, Verified]:
        masks = self._masking.finish()
        rows = [row for i in sampling for row in self._rows(entries[i], masks.get(entries[i].slot, UNMASKED))]
        raw = logits.clone() if any(r.params.logprobs is not None and r.reshaped for r in rows) else logits
        drafts = [Draft(entries[i].drafts, entries[i].draft_parents, entries[i].draft_probs) for i in sampling]
        found: dict[int, Verified] = {}
        at = 0
        for i, verified in zip(sampling, verify(logits, rows, drafts, self._best), strict=True):
            entry, result = entries[i], results[i]
            n = result.drafted = len(entry.drafts)
            if not all(finite[at : at + n + 1]):
                result.failed = True
            elif fault := masks.get(entry.slot, UNMASKED).fault:
                result.failed, result.fault = True, fault
            else:
                found[i] = verified
                result.tokens = verified.tokens
            if (count := rows[at].params.logprobs) is not None and not result.failed:
                behind = raw[[at, *(at + 1 + node for node in verified.path)]]
                result.logprobs = top_logprobs(behind, result.tokens, [count] * len(behind))
            first = entry.start + entry.count - n
            self._tokens[entry.slot, first : first + len(result.tokens)] = result.tokens
            at += n + 1
        return found

    def _rows(self, entry: Entry, masks: SlotMasks) -> list[Row]:
        slot = self._slots[entry.slot]
        assert slot is not None, "a scheduled slot was admitted"
        return rows_of(entry, slot, self._tokens[entry.slot], masks)

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


def _sampled_from(entry: Entry) -> int:
    """Rows of an entry behind which tokens are sampled: its last one that is no draft, and its drafts."""
    return len(entry.drafts) + 1


def last_rows(ends: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Numbers of the last `counts` [R] rows before each of `ends` [R], in order: int64 [counts' sum]."""
    return np.repeat(ends - np.cumsum(counts), counts) + np.arange(counts.sum())


__all__ = ["WORTH_DROPPING", "KVPool", "Runner", "StepForward", "last_rows"]
