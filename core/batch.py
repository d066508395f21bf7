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
    cached: int = 0  # tokens whose KV the cache had; what is there beyond them at the first entry came from elsewhere


@dataclass(slots=True, kw_only=True)
class Entry:
    """One request's share of a step: `count` tokens from position `start` on, the last of them drafts if there are.

    Not to be changed; that isn't enforced, for one is made per request and step, and a frozen one takes thrice as long.

    Drafts are either given, or left to the runner's resident speculator, which may fill up to `draft_slots` of the
    `count` and leaves out the rest.
    """

    slot: int
    start: int
    count: int
    samples: bool  # the logits of the last token (and of each before a draft) are sampled
    first_page: int  # where in the slot's block table the new pages go
    new_pages: list[int]
    drafts: Sequence[int] = ()
    draft_parents: Sequence[int | None] | None = None  # None is a chain
    draft_probs: Tensor | None = None
    draft_slots: int = 0  # for the resident
    follow: bool = False  # the resident keeps up with the request
    prompt_logprobs: int | None = None  # alternatives per prompt token computed in this step

    @property
    def decodes(self) -> bool:
        """Whether it computes the newest token, and drafts at most."""
        return self.samples and self.count - len(self.drafts) - self.draft_slots == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """One step: entries with a single token come first."""

    number: int
    admissions: list[Admission]
    entries: list[Entry]

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes at most."""
        return sum(entry.count for entry in self.entries)


@dataclass(slots=True)
class EntryResult:
    """What came of one entry."""

    tokens: list[int] = field(default_factory=list)  # accepted drafts and the token after them
    drafted: int = 0  # drafts that were verified
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None  # of the prompt tokens after each computed one
    hidden: Tensor | None = None  # [len(tokens) or count, taps, hidden], if a speculator asked
    failed: bool = False  # nothing could be sampled; `tokens` is empty
    fault: str = "the model computed values that are not finite for this request"  # why, if it failed


@dataclass(slots=True)
class StepResult:
    """Results in the order of the entries."""

    entries: list[EntryResult]
    draft_fault: str = ""  # what the resident did wrong in this step
    draft_seconds: float = 0.0  # that it took, for drafting and for following


__all__ = ["Admission", "Entry", "EntryResult", "StepBatch", "StepResult"]
