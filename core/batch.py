"""What a step is told and what it answers: plain data between scheduler and runner, in either process.

The runner keeps the tokens and the block table of each slot, so that a step carries only what is new.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from engine.messages import TokenLogprobs
from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A request takes a slot. Whatever the slot held before is forgotten."""

    slot: int
    tokens: list[int]  # prompt, and output if the request was preempted before
    prompt_len: int
    params: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]  # kept from being sampled while `min_tokens` is not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One request's share of a step: `count` tokens from position `start` on, the last of them drafts if there are."""

    slot: int
    start: int
    count: int
    samples: bool  # the logits of the last token (and of each before a draft) are sampled
    first_page: int  # where in the slot's block table the new pages go
    new_pages: list[int]
    drafts: Sequence[int] = ()
    draft_probs: Tensor | None = None
    prompt_logprobs: int | None = None  # alternatives per prompt token computed in this step


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step: entries with a single token come first."""

    number: int
    admissions: list[Admission]
    entries: list[Entry]

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return sum(entry.count for entry in self.entries)


@dataclass(slots=True)
class EntryResult:
    """What came of one entry."""

    tokens: list[int] = field(default_factory=list)  # accepted drafts and the token after them
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt tokens after each computed one
    hidden: Tensor | None = None  # [len(tokens) or count, taps, hidden], if a speculator asked
    failed: bool = False  # nothing could be sampled; `tokens` is empty
    fault: str = "the model computed values that are not finite for this request"  # why, if it failed


@dataclass(slots=True)
class StepResult:
    """Results in the order of the entries."""

    entries: list[EntryResult]


__all__ = ["Admission", "Entry", "EntryResult", "StepBatch", "StepResult"]
