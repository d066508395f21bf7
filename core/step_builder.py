"""The step that is being put together: what is in it, and what still fits."""

from __future__ import annotations

from dataclasses import dataclass

from engine.batch import Admission, Entry
from engine.pacing import Room
from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a step and of the queue."""

    max_running: int
    max_waiting: int
    token_budget: int
    prefill_chunk: int


class StepBuilder:
    """Entries in the order in which they were added; `budget` counts down."""

    def __init__(self, limits: Limits, owed: int) -> None:
        self.budget, self.chunk = max(limits.token_budget, owed), limits.prefill_chunk
        self.owed = owed  # decodes that are still to come: a token each
        self.room = Room()
        self.admissions: list[Admission] = []
        self.entries: list[Entry] = []
        self.requests: list[Request] = []
        self.preempted = False

    @property
    def full(self) -> bool:
        """Whether nothing more fits."""
        return self.budget <= 0 or self.room.spent

    def fit(self, wanted: int, start: int) -> int:
        """How many of the tokens that a request wants to compute from `start` on fit."""
        room = self.room.tokens(start)
        return min(wanted, self.budget, self.chunk, wanted if room is None else room)

    def add(self, request: Request, entry: Entry) -> None:
        self.entries.append(entry)
        self.requests.append(request)
        self.budget -= entry.count
        self.room.take(entry)


__all__ = ["Limits", "StepBuilder"]
