"""Drives one resident speculator within the runner's step: drafts before the target's forward pass, follows after it.

Whatever the resident raises or proposes, the step goes on: without its drafts, and with a fault to be reported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from engine.batch import Admission, Entry
from engine.resident.pages import DraftPages, NoLayers, PagedDrafts
from engine.resident.stored import Stored
from engine.specs.speculator import Draft, Drafted, ExtendBatch, ResidentPlan, ResidentSpeculator
from engine.trees import best_chain, usable

T = TypeVar("T")

log = logging.getLogger(__name__)

CATCH_UP = 512
"""Most missing items of one request that a step fills in."""


class Computed(NamedTuple):
    """An entry that the target has computed."""

    entry: Entry
    row: int  # of its first token among the step's hidden states
    path: Sequence[int]  # its drafts that were accepted, as indices
    sound: bool  # False if nothing could be sampled

    @property
    def stop(self) -> int:
        """Its tokens stand up to this position."""
        return self.entry.start + self.entry.count - len(self.entry.drafts) + len(self.path)


class _Share(NamedTuple):
    """What is to be stored for one entry."""

    computed: Computed
    begin: int
    stop: int


@dataclass(slots=True)
class Account:
    """What came of the resident in one step."""

    fault: str = ""
    seconds: float = 0.0


class Resident:
    """Belongs to one runner.

    Args:
        speculator: loaded.
        tokens: the runner's tokens by slot, int64 [slots, max_len + 1].
        tables: its block tables.
        pages: the draft pool; None if the resident keeps no KV.
        target_pages: pages of the target's pool.
        chain: as in `ResidentParts`.
        trees: whether trees can be verified.
    """

    def __init__(
        self,
        speculator: ResidentSpeculator,
        plan: ResidentPlan,
        pages: DraftPages | None,
        tokens: np.ndarray,
        tables: np.ndarray,
        *,
        target_pages: int,
        page_size: int,
        vocab_size: int,
        chain: int,
        trees: bool,
        device: torch.device,
    ) -> None:
        self.chain, self.vocab_size = chain, vocab_size
        self.speculator, self.pages, self._tokens, self._tables = speculator, pages, tokens, tables
        self._trees, self._device = trees, device
        self._stateless = not (plan.taps.hidden_layers or plan.taps.final_hidden)
        self.stored = Stored(slots=len(tables), pages=target_pages, page_size=page_size, catches_up=self._stateless)
        self._params: list[Admission | None] = [None] * len(tables)
        self._account = Account()

    def admit(self, admission: Admission) -> None:
        """A request takes a slot."""
        self._params[admission.slot] = admission
        self.stored.admit(admission)

    def account(self) -> Account:
        """What the step came to; the next one begins."""
        done, self._account = self._account, Account()
        return done

    # Before the target's forward pass

    def draft(self, entries: Sequence[Entry]) -> list[Entry]:
        """The entries with drafts where there were slots for some."""
        asked = [entry for entry in entries if entry.draft_slots]
        if not asked:
            return list(entries)
        ready = [entry for entry in asked if entry.samples and self.stored.ready(entry)]
        drafts = self.guarded(lambda: self._draft(ready)) if ready else None
        by_slot = drafts or {}
        return [_filled(entry, by_slot.get(entry.slot, Draft())) if entry.draft_slots else entry for entry in entries]

    def chains(self, entries: Sequence[Entry]) -> Tensor | None:
        """Chains for entries that are ready, int64 [R, chain], on the device; None on a fault."""
        drafted = self.guarded(lambda: self.speculator.draft(self._draft_batch(entries, self.chain)))
        return drafted.tokens if drafted is not None and drafted.parents is None and drafted.counts is None else None

    def _draft(self, entries: Sequence[Entry]) -> dict[int, Draft]:
        drafted = self.speculator.draft(self._draft_batch(entries))
        found = {}
        for entry, draft in zip(entries, _rows(drafted, len(entries)), strict=True):
            sound, fault = usable(draft, entry.draft_slots, self.vocab_size)
            self._fault(fault)
            found[entry.slot] = sound if self._trees else best_chain(sound)
        return found

    def _draft_batch(self, entries: Sequence[Entry], room: int = 0) -> PagedDrafts:
        slots = np.array([entry.slot for entry in entries])
        positions = np.array([entry.start for entry in entries])
        first = np.array([self.stored.first[slot] for slot in slots])
        admissions = [admission for slot in slots if (admission := self._params[slot]) is not None]
        return PagedDrafts(
            slots=self._put(slots),
            tokens=self._put(self._tokens[slots, positions]),
            positions=self._put(positions),
            rooms=[room or entry.draft_slots for entry in entries],
            params=[admission.params for admission in admissions],
            seeds=[admission.seed for admission in admissions],
            pages=self.pages,
            places=self.pages.places(slots, first, positions) if self.pages else None,
        )

    # After it

    def follow(self, computed: Sequence[Computed], states: Sequence[Tensor]) -> None:
        """Let the resident store the items of what stands now.

        Args:
            states: of the step's tokens, one [T, hidden] for each tap.
        """
        shares = [share for one in computed if (share := self._share(one)) is not None]
        if not shares:
            return
        shares.sort(key=lambda share: share.stop - share.begin > 1)
        done = self.guarded(lambda: self._extend(shares, states))
        for one, begin, stop in shares:
            table = self._tables[one.entry.slot]
            if done:
                self.stored.store(one.entry.slot, begin, stop, table)
            else:
                self.stored.skip(one.entry, table)

    def pass_by(self, slots: np.ndarray, starts: np.ndarray, ends: np.ndarray) -> None:
        """The target computes these positions of slots, and the resident isn't told; all int64 [R]."""
        self.stored.skip_all(slots, starts, ends, self._tables)

    def _share(self, one: Computed) -> _Share | None:
        entry, table = one.entry, self._tables[one.entry.slot]
        if not entry.follow or not one.sound:
            self.stored.skip(entry, table)
            return None
        begin, stop = self.stored.begin(entry, table), one.stop
        if begin < entry.start:
            stop = min(stop, begin + CATCH_UP)
        return _Share(one, begin, stop) if begin < stop else None

    def _extend(self, shares: Sequence[_Share], states: Sequence[Tensor]) -> bool:
        slots = np.array([share.computed.entry.slot for share in shares])
        begin = np.array([share.begin for share in shares])
        counts = np.array([share.stop for share in shares]) - begin
        positions = np.concatenate([np.arange(share.begin, share.stop) for share in shares])
        owner = np.repeat(slots, counts)
        first = np.array([self.stored.first[slot] for slot in slots])
        hidden = None
        if not self._stateless:
            rows = self._put(np.concatenate([_state_rows(share) for share in shares]))
            hidden = torch.stack([state[rows] for state in states], 1)
        self.speculator.extend(
            ExtendBatch(
                slots=self._put(slots),
                counts=counts.tolist(),
                last=self._put(np.cumsum(counts) - 1),
                tokens=self._put(self._tokens[owner, positions]),
                next_tokens=self._put(self._tokens[owner, positions + 1]),
                positions=self._put(positions),
                hidden=hidden,
                step=self.pages.follow(slots, first, begin, counts) if self.pages else NoLayers(),
            )
        )
        return True

    def guarded(self, work: Callable[[], T]) -> T | None:
        """What the resident answers; None if it raises, which is noted."""
        began = time.perf_counter()
        try:
            return work()
        except Exception as error:  # a stranger's code: the step goes on without it
            log.debug("the resident speculator failed", exc_info=True)
            self._fault(f"{type(error).__name__}: {error}")
            return None
        finally:
            self._account.seconds += time.perf_counter() - began

    def _fault(self, reason: str) -> None:
        self._account.fault = self._account.fault or reason

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)


def _filled(entry: Entry, draft: Draft) -> Entry:
    return replace(
        entry,
        count=entry.count - entry.draft_slots + len(draft.tokens),
        drafts=list(draft.tokens),
        draft_parents=draft.parents,
        draft_probs=draft.probs,
        draft_slots=0,
    )


def _rows(drafted: Drafted, requests: int) -> list[Draft]:
    """Each request's draft."""
    tokens = drafted.tokens.tolist()
    parents = None if drafted.parents is None else drafted.parents.tolist()
    counts = [len(row) for row in tokens] if drafted.counts is None else drafted.counts
    if not len(tokens) == len(counts) == requests:
        raise ValueError(f"drafts for {len(tokens)} requests came back, where {requests} were asked for")
    return [
        Draft(
            tokens[i][:count],
            None if parents is None else [None if node < 0 else node for node in parents[i][:count]],
            None if drafted.probs is None else drafted.probs[i, :count],
        )
        for i, count in enumerate(counts)
    ]


def _state_rows(share: _Share) -> np.ndarray:
    """Where the states of a share lie among those of the step."""
    entry, row, path, _ = share.computed
    plain = entry.count - len(entry.drafts)
    rows = np.concatenate((np.arange(plain), plain + np.array(path, dtype=np.int64)))
    return row + rows[share.begin - entry.start : share.stop - entry.start]


__all__ = ["CATCH_UP", "Account", "Computed", "Resident"]
