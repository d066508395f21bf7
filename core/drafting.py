"""Between scheduler and speculator: asks for drafts, cuts them to what can be verified, and counts what they bring.

A speculator can't harm a request: a draft that raises, is too long or names ids that don't exist becomes a shorter one
or none, with a warning the first time. How long drafts may be is decided by `engine.speculation`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from torch import Tensor

from engine.batch import EntryResult, StepBatch, StepResult
from engine.request import Request, Status
from engine.scheduler import Drafts
from engine.specs.speculator import AnySpeculator, Draft, DraftContext, Speculator
from engine.speculation.counters import DraftCounters
from engine.speculation.lengths import Candidate, DraftedStep, Lengths
from engine.trees import best_chain, usable

log = logging.getLogger(__name__)


class Drafter(Drafts):
    """Drives one speculator.

    Args:
        name: what requests call it.
        max_draft: most draft tokens of one request.
        trees: whether trees can be verified; if not, their likeliest chain is.
        lengths: decides how long drafts are; always as long as possible if unset.
        clock: seconds, of which only differences count.
    """

    def __init__(
        self,
        speculator: AnySpeculator,
        *,
        max_draft: int,
        vocab_size: int,
        name: str = "",
        trees: bool = True,
        lengths: Lengths | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.speculator, self.name, self.max_draft, self.vocab_size = speculator, name, max_draft, vocab_size
        self.trees, self.lengths = trees, lengths or Lengths()
        self.counters = DraftCounters(max_draft)
        self._clock = clock
        self._resident = not isinstance(speculator, Speculator)
        self._hidden: dict[str, Tensor] = {}
        self._asked = self._waited = False  # the step under way was to draft; the one before was
        self._ended = 0.0  # when the step before came in
        self._drafting = 0.0  # seconds that the speculator took for the step under way
        self._faults = 0  # its mistakes in that step

    def due(self, running: Iterable[Request]) -> bool:
        """Whether the next step is to draft; it then has to wait for the tokens of the step before."""
        self._asked = False
        if not self.lengths.awake:
            return False
        decoding = [r for r in running if r.status is Status.RUNNING and r.remaining == 1]
        return self.lengths.due([r.id for r in decoding if self._room(r)], len(decoding))

    def propose(self, running: Iterable[Request]) -> Mapping[str, Draft | int]:
        """Drafts for the requests that are about to decode, or how many tokens a resident may draft for them; those
        for which nothing is drafted are left out."""
        self._asked, self._drafting, self._faults = True, 0.0, 0
        decoding = [r for r in running if r.status is Status.RUNNING and r.remaining == 1 and not r.in_flight]
        candidates = [Candidate(r.id, len(r.tokens), room) for r in decoding if (room := self._room(r))]
        lengths = self.lengths.lengths(candidates, len(decoding))
        wanted = {c.request_id: length for c, length in zip(candidates, lengths, strict=True) if length}
        if not isinstance(self.speculator, Speculator):
            return wanted
        contexts = [
            DraftContext(r.id, r.tokens, r.prompt_len, wanted[r.id], self._hidden.get(r.id))
            for r in decoding
            if r.id in wanted
        ]
        return self._drafts(self.speculator, contexts) if contexts else {}

    def follows(self, request: Request) -> bool:
        """See `Drafts.follows`; never where nothing may be drafted. Asked for every entry of every step."""
        if not self._resident or (request.params.speculation is not None and not self._room(request)):
            return False
        return self.lengths.follows(request.id, fresh=not request.num_output)

    def measured(self, batch: StepBatch, result: StepResult) -> None:
        """The result of a step has just come in; steps are measured from one to the next."""
        if result.draft_fault:
            self._fault(result.draft_fault)
        now = self._clock()
        seconds, self._ended = now - self._ended, now
        entries = batch.entries
        asked, waited = self._asked, self._waited
        self._asked, self._waited = False, asked
        if not asked:  # entries with a single token come first
            pure = bool(entries) and not batch.admissions and entries[-1].count == 1
            self.lengths.plain(len(entries) if pure else 0, seconds if pure and not waited else None)
            return
        drafted = [got.drafted for got in result.entries]
        accepted = sum(max(0, len(got.tokens) - 1) for got in result.entries)
        step = DraftedStep(len(entries), sum(drafted), accepted, max(drafted, default=0), self._faults)
        pure = bool(entries) and not batch.admissions and all(entry.decodes for entry in entries)
        self.lengths.drafted(step, seconds if pure else None, self._drafting + result.draft_seconds)

    def accepted(self, request: Request, drafted: int, got: EntryResult) -> None:
        """See `Drafts.accepted`."""
        if got.hidden is not None:
            self._hidden[request.id] = got.hidden
        if not drafted:
            return
        accepted, context = len(got.tokens) - 1, len(request.tokens)
        self.counters.count(context, drafted, accepted)
        self.lengths.verified(request.id, context, drafted, accepted)
        if isinstance(self.speculator, Speculator):
            self.speculator.accepted(request.id, drafted, accepted)

    def forget(self, request_id: str) -> None:
        """See `Drafts.forget`."""
        self._hidden.pop(request_id, None)
        self.lengths.forget(request_id)
        if isinstance(self.speculator, Speculator):
            self.speculator.forget(request_id)

    def stats(self) -> dict[str, Any]:
        """For metrics; JSON values only."""
        return {**asdict(self.counters), "controller": self.lengths.stats()}

    def _fault(self, reason: str) -> None:
        """A proposal raised or was malformed."""
        self._faults += 1
        self.counters.faults += 1
        if self.counters.faults == 1:
            log.warning("the speculator made an unusable draft (%s); such steps run without one", reason)

    def _room(self, request: Request) -> int:
        """Most draft tokens that the request may have after its next token."""
        asked = request.params.speculation
        if asked is None:
            return min(self.max_draft, max(0, request.draft_room))
        most = 0 if asked.method == "none" else self.max_draft if asked.max_tokens is None else asked.max_tokens
        return min(most, self.max_draft, max(0, request.draft_room))

    def _drafts(self, speculator: Speculator, contexts: Sequence[DraftContext]) -> Mapping[str, Draft | int]:
        began = self._clock()
        try:
            drafts = speculator.propose(contexts)
            return {c.request_id: kept for c, d in zip(contexts, drafts, strict=True) if (kept := self._usable(c, d))}
        except Exception as error:  # a stranger's code: the requests go on with plain steps
            self._fault(f"{type(error).__name__}: {error}")
            return {}
        finally:
            self._drafting = self._clock() - began

    def _usable(self, context: DraftContext, draft: Draft) -> Draft | None:
        """What of the draft can be verified, if anything."""
        kept, fault = usable(draft, context.max_tokens, self.vocab_size)
        if fault:
            self._fault(fault)
        return (kept if self.trees else best_chain(kept)) if kept.tokens else None


__all__ = ["Drafter"]
