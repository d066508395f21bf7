"""Between scheduler and speculator: asks for drafts, cuts them to what can be verified, and counts what they bring.

A speculator can't harm a request: a draft that raises, is too long or names ids that don't exist becomes a shorter one
or none, with a warning the first time.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from engine.batch import EntryResult
from engine.request import Request, Status
from engine.scheduler import Drafts
from engine.specs.speculator import Draft, DraftContext, Speculator

log = logging.getLogger(__name__)


@dataclass(slots=True)
class DraftCounters:
    """Since the start. Acceptance length is `(accepted + steps) / steps`."""

    steps: int = 0  # verified steps that contained a draft
    drafted: int = 0
    accepted: int = 0
    faults: int = 0  # proposals that raised or were malformed


class Drafter(Drafts):
    """Drives one speculator."""

    def __init__(self, speculator: Speculator, *, max_draft: int, vocab_size: int) -> None:
        self.speculator, self.max_draft, self.vocab_size = speculator, max_draft, vocab_size
        self.counters = DraftCounters()
        self._hidden: dict[str, Tensor] = {}

    def propose(self, running: Iterable[Request]) -> dict[str, Draft]:
        """Drafts for the requests that are about to decode; those without a usable draft are left out."""
        ready = [r for r in running if self._can_draft(r)]
        if not ready:
            return {}
        contexts = [
            DraftContext(r.id, r.tokens, r.prompt_len, min(self.max_draft, r.draft_room), self._hidden.get(r.id))
            for r in ready
        ]
        try:
            drafts = self.speculator.propose(contexts)
            return {c.request_id: kept for c, d in zip(contexts, drafts, strict=True) if (kept := self._usable(c, d))}
        except Exception as error:  # a stranger's code: the requests go on with plain steps
            self._fault(f"{type(error).__name__}: {error}")
            return {}

    @staticmethod
    def _can_draft(request: Request) -> bool:
        decoding = request.status is Status.RUNNING and request.remaining == 1
        return decoding and not request.in_flight and request.draft_room > 0

    def _usable(self, context: DraftContext, draft: Draft) -> Draft | None:
        """The first path of the draft as a chain, up to the first id that doesn't exist."""
        chain = list(range(len(draft.tokens))) if draft.parents is None else _first_path(draft)
        kept = []
        for node in chain[: context.max_tokens]:
            if not 0 <= draft.tokens[node] < self.vocab_size:
                self._fault(f"token {draft.tokens[node]} is outside the vocabulary of {self.vocab_size}")
                break
            kept.append(node)
        if not kept:
            return None
        probs = draft.probs[kept] if draft.probs is not None else None
        return Draft([int(draft.tokens[node]) for node in kept], probs=probs)

    def accepted(self, request: Request, drafted: int, got: EntryResult) -> None:
        if got.hidden is not None:
            self._hidden[request.id] = got.hidden
        if not drafted:
            return
        accepted = len(got.tokens) - 1
        self.counters.steps += 1
        self.counters.drafted += drafted
        self.counters.accepted += accepted
        self.speculator.accepted(request.id, drafted, accepted)

    def forget(self, request_id: str) -> None:
        self._hidden.pop(request_id, None)
        self.speculator.forget(request_id)

    def _fault(self, reason: str) -> None:
        self.counters.faults += 1
        if self.counters.faults == 1:
            log.warning("the speculator made an unusable draft (%s); such steps run without one", reason)


def _first_path(draft: Draft) -> list[int]:
    """Indices from the root down, always taking the first child: the likeliest chain of a tree sorted by score."""
    path: list[int] = []
    at: int | None = None
    for node, parent in enumerate(draft.parents or ()):
        if parent == at:
            path.append(node)
            at = node
    return path


__all__ = ["DraftCounters", "Drafter"]
