"""Training-time test: a head is unrolled as it will draft, and each step is taught the target's own distribution.

Step i pairs the state that step i - 1 left at position t with token t + 1 + i, and is taught what the target says after
that token, restricted to the draft vocabulary and renormalised (EAGLE-3, arXiv 2503.01840).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from engine.plugins.speculators.eagle.module import EagleModule
from engine.plugins.speculators.eagle.training.attend import FusedUnrolled
from engine.plugins.speculators.eagle.training.target import States, Target

DECAY: Final = 0.8
"""Each step of the unrolling counts so much less than the one before."""

ROWS: Final = 4096
"""Positions whose logits over the whole vocabulary are computed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the target says about one batch of B rows of T tokens; N positions are taught, each to all steps."""

    states: States  # each [B, T, …]
    row: Tensor  # int64 [N]
    position: Tensor  # int64 [N], of the token whose successor is to be guessed
    probabilities: Tensor  # [N, draft_vocab], of the successor


class SoftCrossEntropy(torch.autograd.Function):
    """Logits [N, V] and probabilities [N, V] (rows sum to one) -> float32 [N]: minus sum p log softmax(z)."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, probabilities: Tensor) -> Tensor:
        wide = logits.float()
        lse = wide.logsumexp(-1)
        ctx.save_for_backward(logits, probabilities, lse)
        return lse - (wide * probabilities).sum(-1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        logits, probabilities, lse = ctx.saved_tensors
        slope = (logits.float() - lse.unsqueeze(-1)).exp_().sub_(probabilities).mul_(grads[0].unsqueeze(-1))
        return slope.to(logits.dtype), None


@torch.no_grad()
def teach(
    target: Target,
    states: States,
    taught: Tensor,
    ids: Tensor,
    steps: int,
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> Lesson:
    """What the target says after the tokens in `taught` (bool [B, T]), as far as the draft vocabulary can say it.

    The first `steps` positions are left out, so that every step of the unrolling is taught the same ones; so are those
    where the target's first choice is outside of the draft vocabulary `ids` (int64 [draft_vocab], ascending). At a
    `temperature` below 1 the first choice counts for more.
    """
    taught = taught.clone()
    taught[:, :steps] = False
    row, position = taught.nonzero(as_tuple=True)
    kept, found = [], []
    for at in range(0, max(len(row), 1), ROWS):  # once for no row, too
        logits = target.logits(states.final[row[at : at + ROWS], position[at : at + ROWS]])
        inside = logits[:, ids]
        possible = inside.amax(-1) >= logits.amax(-1)
        kept.append(possible)
        found.append((inside[possible] / temperature).softmax(-1).to(dtype))
    possible = torch.cat(kept)
    return Lesson(states=states, row=row[possible], position=position[possible], probabilities=torch.cat(found))


def unrolled_loss(head: EagleModule, lesson: Lesson, steps: int) -> tuple[Tensor, Tensor]:
    """The loss, and float32 [steps]: the share of positions at which each step's first choice is the target's."""
    embeddings, states = lesson.states.embeddings, head.fuse(lesson.states.taps)
    length = embeddings.shape[1]
    places = torch.arange(length, device=embeddings.device).expand(embeddings.shape[:2])
    best = lesson.probabilities.argmax(-1)
    attend, total, right = FusedUnrolled(), states.new_zeros((), dtype=torch.float32), []
    for step in range(steps):
        later = torch.roll(embeddings, -1 - step, 1)  # what wraps round is never taught
        states, normed = head(later, states, (places + step).clamp_max(len(head.cos_sin) - 1), attend)
        logits = head.logits(normed[lesson.row, lesson.position - 1 - step])
        loss: Tensor = SoftCrossEntropy.apply(logits, lesson.probabilities)  # type: ignore[no-untyped-call]
        total = total + DECAY**step * loss.mean()
        right.append((logits.detach().argmax(-1) == best).float().mean())
    return total, torch.stack(right)


__all__ = ["Lesson", "SoftCrossEntropy", "teach", "unrolled_loss"]
