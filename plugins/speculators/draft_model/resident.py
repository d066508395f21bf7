"""A whole model beside its target: it reads what the target reads, and says greedily what it would go on with.

Its drafts are point masses, so a seeded text is the same with and without them. All calls come from the runner's
thread; the model keeps its KV in the pages that the core gives it, and nothing else.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from engine.specs.attention import AttentionShape
from engine.specs.model import Forward, Model
from engine.specs.speculator import (
    Checkpoint,
    DraftBatch,
    Drafted,
    ExtendBatch,
    OtherModel,
    ResidentPlan,
    ResidentSpeculator,
    Target,
)
from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


class DraftModel(ResidentSpeculator):
    """Composed, loaded and quantized by the rules for the target.

    Args:
        source: of the model, as `model.source` would name it.
    """

    _other: OtherModel
    _model: Model
    _vocab: int

    def __init__(self, source: str) -> None:
        self._source = source

    def plan(self, checkpoint: Checkpoint) -> ResidentPlan:
        """See `ResidentSpeculator.plan`."""
        self._other = other = checkpoint.open_model(self._source)
        check_vocabulary(self._source, other.tokenizer(), checkpoint.tokenizer())
        if other.profile.max_context < checkpoint.profile.max_context:
            log.warning(
                "the draft model %s was made for %d tokens; beyond, it guesses worse",
                self._source,
                other.profile.max_context,
            )
        return ResidentPlan(kv=AttentionShape.of(other.profile, checkpoint.dtype), places=checkpoint.max_draft)

    def load(self, target: Target) -> None:
        """See `ResidentSpeculator.load`."""
        self._model = self._other.load(target.max_positions)
        self._vocab = min(self._other.profile.vocab_size, target.profile.vocab_size)

    def extend(self, batch: ExtendBatch) -> None:
        """Read what stands."""
        self._model.forward(batch.tokens, batch.positions, batch.step)

    def draft(self, batch: DraftBatch) -> Drafted:
        """Go on from the newest token, one pass for each draft token."""
        tokens, drafted = batch.tokens, []
        for place in range(max(batch.rooms)):
            positions = batch.positions + place
            tokens = self._next(tokens, positions, batch.step(place, positions.unsqueeze(1)))
            drafted.append(tokens)
        return Drafted(tokens=torch.stack(drafted, dim=1))

    def weight_bytes(self) -> int:
        """See `ResidentSpeculator.weight_bytes`."""
        return self._model.weight_bytes()

    def _next(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        """Likeliest token after each, of those that the target knows; int64 [R]."""
        logits = self._model.logits(self._model.forward(tokens, positions, step))
        return logits[:, : self._vocab].argmax(dim=-1)


def check_vocabulary(source: str, drafts: Tokenizer, target: Tokenizer) -> None:
    """Tokens are passed on by their ids.

    Raises:
        ValueError: an id means something else to the draft model.
    """
    if drafts.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model {source} has a vocabulary of {drafts.vocab_size} tokens, but the model has "
            f"{target.vocab_size}; use a draft model of the same family"
        )
    for token in range(target.vocab_size):
        if drafts.token_bytes(token) != target.token_bytes(token):
            raise ValueError(
                f"the draft model {source} has another vocabulary: token {token} is {drafts.token_text(token)!r} to it "
                f"and {target.token_text(token)!r} to the model; use a draft model of the same family"
            )


__all__ = ["DraftModel", "check_vocabulary"]
