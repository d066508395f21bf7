"""Steps whose drafts the host never sees: which ones they are, what they are told, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.batch import Admission, Entry, EntryResult, StepResult
from engine.cuda.drafts import DeviceDrafting
from engine.cuda.inputs import NOT_SAMPLED, sampling_fields
from engine.cuda.sampling import BAD

if TYPE_CHECKING:
    from engine.cuda.inputs import RowInputs


class DraftedSteps:
    """Belongs to one runner.

    Args:
        row_inputs: what the host knows of entries: slots, first positions, positions after the last, who samples.
        tokens: of every slot, int64 [slots, …].
        admission: of a slot.
    """

    def __init__(
        self,
        drafting: DeviceDrafting,
        row_inputs: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], RowInputs],
        tokens: np.ndarray,
        tables: np.ndarray,
        admission: Callable[[int], Admission],
    ) -> None:
        self.drafting, self._resident, self._inputs = drafting, drafting.resident, drafting.inputs
        self._row_inputs, self._tokens, self._tables, self._admission = row_inputs, tokens, tables, admission
        rows = drafting.most_requests * drafting.width
        self._on_cuda = drafting.sampled.device.type == "cuda"
        self._sampled_host = torch.zeros(rows, dtype=torch.int32, pin_memory=self._on_cuda)
        self._accepted_host = torch.zeros(drafting.most_requests, dtype=torch.int32, pin_memory=self._on_cuda)
        self._ahead: dict[int, tuple[int, int]] = {}  # slot -> row of its drafts, position of the token before them
        self._pending: Callable[[], StepResult] | None = None

    def forget(self, slot: int) -> None:
        """Another request has the slot."""
        self._ahead.pop(slot, None)

    def settle(self) -> None:
        """Take in the step under way, if there is one."""
        if self._pending is not None:
            self._pending()

    def fit(self, entries: Sequence[Entry]) -> bool:
        """Whether a step of these, all plain for the device's sampler, can go this way."""
        stored, width = self._resident.stored, self.drafting.width
        return len(entries) <= self.drafting.most_requests and all(
            entry.decodes
            and entry.follow
            and not entry.drafts
            and entry.draft_slots < width
            and stored.ready(entry)
            and not stored.first[entry.slot]
            for entry in entries
        )

    def launch(self, entries: Sequence[Entry]) -> Callable[[], StepResult] | None:
        """Queue a step; what is returned waits for its tokens. None if there are no drafts to be had."""
        if not self._gather(entries):
            return None
        size, width = self.drafting.size_for(len(entries)), self.drafting.width
        self._inputs.send(self._rows(entries), size * width, width=width)
        self.drafting.verify(size)
        sampled, accepted = self._sampled_host[: len(entries) * width], self._accepted_host[: len(entries)]
        sampled.copy_(self.drafting.sampled[: len(sampled)], non_blocking=True)
        accepted.copy_(self.drafting.accepted[: len(accepted)], non_blocking=True)
        arrived = None
        if self._on_cuda:
            arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrived.record()
        done = self._resident.guarded(lambda: self._follow(size))
        result: list[StepResult] = []

        def finish() -> StepResult:
            if not result:
                if arrived is not None:
                    arrived.synchronize()
                tokens = sampled.view(len(entries), width).tolist()
                result.append(self._taken(entries, tokens, accepted.tolist(), bool(done)))
                self._pending = None
            return result[0]

        self._pending = finish
        return finish

    def _follow(self, size: int) -> bool:
        self.drafting.follow(size)
        return True

    def _gather(self, entries: Sequence[Entry]) -> bool:
        """Bring the drafts of the entries into their order; drafts that are missing are made."""
        known = [self._ahead.get(entry.slot, (-1, -1)) for entry in entries]
        fresh = [i for i, (entry, (_, at)) in enumerate(zip(entries, known, strict=True)) if at != entry.start]
        self._ahead.clear()
        if not fresh and [row for row, _ in known] == list(range(len(entries))):
            return True
        length = self.drafting.width - 1
        drafts = self._inputs.drafts[: self.drafting.most_requests * length].view(-1, length)
        found = drafts[torch.tensor([max(row, 0) for row, _ in known], device=drafts.device)]
        if fresh:
            made = self._resident.chains([entries[i] for i in fresh])
            if made is None or made.shape != (len(fresh), length):
                return False
            found[torch.tensor(fresh, device=drafts.device)] = made.clamp(0, self._resident.vocab_size - 1)
        drafts[: len(entries)] = found
        return True

    def _rows(self, entries: Sequence[Entry]) -> RowInputs:
        slots = np.array([entry.slot for entry in entries])
        starts = np.array([entry.start for entry in entries])
        rows = self._row_inputs(slots, starts, starts + [entry.count for entry in entries], np.zeros(len(slots), bool))
        fields = []
        for entry in entries:
            admission = self._admission(entry.slot)
            at = entry.start + 1  # where the first token stands that is sampled
            fields += [sampling_fields(admission.params, admission.seed, at + i) for i in range(entry.count)]
            fields += [NOT_SAMPLED] * (self.drafting.width - entry.count)
        ids = {row: self._tokens[entry.slot, entry.start : entry.start + 1] for row, entry in enumerate(entries)}
        return replace(rows, ids=ids, sampling=np.array(fields, dtype=np.int32))

    def _taken(
        self, entries: Sequence[Entry], sampled: Sequence[list[int]], accepted: Sequence[int], followed: bool
    ) -> StepResult:
        """What came of a step whose tokens are here."""
        results, stored = [], self._resident.stored
        for row, (entry, tokens, agreed) in enumerate(zip(entries, sampled, accepted, strict=True)):
            count = agreed + 1
            emitted, slot, first = tokens[:count], entry.slot, entry.start + 1
            failed = emitted[-1] == BAD
            result = EntryResult(tokens=[] if failed else emitted, drafted=entry.draft_slots, failed=failed)
            results.append(result)
            if failed or not followed:
                stored.skip(entry, self._tables[slot])
            else:
                stored.store(slot, entry.start, entry.start + count, self._tables[slot])
                self._ahead[slot] = row, entry.start + count
            self._tokens[slot, first : first + len(result.tokens)] = result.tokens
        account = self._resident.account()
        return StepResult(results, account.fault, account.seconds)


__all__ = ["DraftedSteps"]
