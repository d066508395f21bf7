"""How much is drafted for whom, asked before each step, told after it. This one always drafts as much as it may."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Candidate(NamedTuple):
    """A request that may draft."""

    request_id: str
    context: int  # tokens so far
    room: int  # most draft tokens


class DraftedStep(NamedTuple):
    """What was in a step that asked for drafts."""

    rows: int  # requests
    tokens: int  # draft tokens
    accepted: int  # of these
    depth: int  # draft tokens of the request with the most
    faults: int = 0  # proposals that raised or were malformed


class Lengths:
    """For one engine; all calls come from the scheduler's thread."""

    @property
    def awake(self) -> bool:
        """Whether the next step may be one that drafts; else there is no need to look who could."""
        return True

    def due(self, able: Sequence[str], rows: int) -> bool:
        """Whether the next step, in which `rows` requests decode and these can be drafted for, is to draft."""
        return bool(able)

    def lengths(self, candidates: Sequence[Candidate], rows: int) -> list[int]:
        """Most draft tokens for each of those that can draft now, `rows` requests being in the step."""
        return [candidate.room for candidate in candidates]

    def follows(self, request_id: str, fresh: bool) -> bool:
        """Whether a resident speculator is to see what the next step computes of a request; `fresh` if nothing of it
        was computed yet."""
        return True

    def verified(self, request_id: str, context: int, drafted: int, accepted: int) -> None:
        """What came of one request's draft."""

    def plain(self, rows: int, seconds: float | None) -> None:
        """A step without drafts is over.

        Args:
            rows: requests in it.
            seconds: how long it took; None if that tells nothing, since prompts were in it or it came after one that
                waited for drafts.
        """

    def drafted(self, step: DraftedStep, seconds: float | None, drafting: float) -> None:
        """A step that asked for drafts is over.

        Args:
            seconds: how long it took; None if that tells nothing, since prompts were in it.
            drafting: seconds of it that the speculator took, as far as known.
        """

    def forget(self, request_id: str) -> None:
        """The request is gone."""

    def stats(self) -> dict[str, Any]:
        """For metrics, JSON values only; empty if nothing is decided here."""
        return {}

    def turns(self) -> list[dict[str, Any]]:
        """The latest decisions, for people."""
        return []


__all__ = ["Candidate", "DraftedStep", "Lengths"]
