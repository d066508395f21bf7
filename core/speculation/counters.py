"""What became of draft tokens since the start."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.speculation.acceptance import CONTEXTS, context_bucket, context_name


@dataclass(slots=True)
class ContextCounters:
    """Of the drafts made at some length of context."""

    context: str  # tokens, such as `256-1023`
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftCounters:
    """Acceptance length, the tokens that a verified draft brings, is `(accepted + steps) / steps`."""

    most: int  # draft tokens of one request and step
    steps: int = 0  # drafts verified: one for each request and step that had any
    drafted: int = 0
    accepted: int = 0
    faults: int = 0  # proposals that raised or were malformed
    accepted_at: list[int] = field(init=False)  # by place in the draft
    contexts: list[ContextCounters] = field(
        default_factory=lambda: [ContextCounters(context_name(bucket)) for bucket in range(len(CONTEXTS) + 1)]
    )

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.most

    def totals(self) -> tuple[int, int, int]:
        """Drafts, their tokens, and those that were kept."""
        return self.steps, self.drafted, self.accepted

    def count(self, context: int, drafted: int, accepted: int) -> None:
        """A draft of a request with `context` tokens was verified."""
        for counters in (self, self.contexts[context_bucket(context)]):
            counters.steps += 1
            counters.drafted += drafted
            counters.accepted += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1


__all__ = ["ContextCounters", "DraftCounters"]
