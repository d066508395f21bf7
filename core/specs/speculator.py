"""Extension point: speculators, which guess tokens that the target model then verifies.

The core verifies, rolls back and counts; a speculator only proposes. `propose` runs once a step on the scheduler's
thread, with the tokens of the step before; so an engine that speculates does not schedule ahead.

Threads: all calls come from the scheduler's thread, one at a time: `taps` once, then in each step `propose`, and after
the step `accepted` for each request that had a draft; `forget` when a request leaves.

Errors: what `propose` raises is counted and logged, and the step runs without drafts; so do malformed drafts. The
other methods must not raise.

`build(options, *, profile: ModelProfile, max_running: int) -> Speculator`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer

if TYPE_CHECKING:
    from torch import Tensor

API: Final = 1
HOOK: Final = "speculators"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetTaps:
    """What a speculator wants to see of the target's forward pass.

    `hidden_layers` are layer indices; the state that *enters* that layer is tapped, and index `layers` means the state
    before the final norm.
    """

    hidden_layers: tuple[int, ...] = ()
    final_hidden: bool = False  # the state after the final norm


@dataclass(frozen=True, slots=True)
class DraftContext:
    """One request that may be drafted for. `hidden` is present when taps were asked for."""

    request_id: str
    tokens: Sequence[int]  # prompt and output so far; read only
    prompt_len: int
    max_tokens: int  # at most this many draft tokens may be proposed
    hidden: Tensor | None = None  # [new tokens, taps, hidden size]


@dataclass(frozen=True, slots=True)
class Draft:
    """A chain or tree of draft tokens.

    `parents[i]` is the index of the draft token that i follows, or None when i follows the last real token; without
    `parents` the draft is a chain. `probs` is the distribution each token was sampled from, float32 [n, vocab]; without
    it the draft counts as a point mass. Parents come before their children, siblings are distinct.
    """

    tokens: Sequence[int] = ()
    parents: Sequence[int | None] | None = None
    probs: Tensor | None = None


class Speculator(ABC):
    """Proposes draft tokens. Wrong, empty or invalid drafts cost time, never correctness."""

    def taps(self) -> TargetTaps:
        """What `DraftContext.hidden` must hold; nothing by default."""
        return TargetTaps()

    @abstractmethod
    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """One draft per context, in order; an empty draft is a plain step."""

    def accepted(self, request_id: str, drafted: int, accepted: int) -> None:  # noqa: B027
        """Learn how many draft tokens of the last proposal were kept."""

    def forget(self, request_id: str) -> None:  # noqa: B027
        """The request is gone (finished, aborted or preempted): drop what is kept for it."""


BUILDS: Final = Speculator


@hookspec
def speculators() -> Iterable[Offer[Speculator]]:  # type: ignore[empty-body]
    """Offer speculators. Must not import torch."""


__all__ = ["API", "HOOK", "Draft", "DraftContext", "Speculator", "TargetTaps", "speculators"]
