"""Multi-token prediction: the checkpoint's own module guesses the token after next, and then goes on from its guess.

The module pairs the target's state at position t, after the final norm, with the embedding of token t + 1; what it
gives tells token t + 2 and takes the state's place in the next pair, so that one module drafts a chain (DeepSeek-V3,
arXiv 2412.19437, section 2.2). All calls come from the runner's thread.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from engine.specs.attention import AttentionShape
from engine.specs.model import Forward, ModelProfile, NextModule
from engine.specs.speculator import (
    Checkpoint,
    DraftBatch,
    Drafted,
    ExtendBatch,
    ResidentPlan,
    ResidentSpeculator,
    Target,
    TargetTaps,
)


class MtpSpeculator(ResidentSpeculator):
    """The first module of the target's checkpoint, chained. Keeps one state per slot, left by its last pair."""

    _target: Target
    _module: NextModule
    _states: Tensor  # [slots, hidden]

    def plan(self, checkpoint: Checkpoint) -> ResidentPlan:
        """See `ResidentSpeculator.plan`."""
        profile = checkpoint.profile
        if not checkpoint.config.get("num_nextn_predict_layers"):
            raise ValueError(
                f"this checkpoint ({profile.architecture}) has no module that predicts further tokens: its config "
                "lacks num_nextn_predict_layers; use another speculator"
            )
        return ResidentPlan(
            taps=TargetTaps(final_hidden=True),
            kv=_one_layer(profile, checkpoint.dtype),
            places=checkpoint.max_draft - 1,
        )

    def load(self, target: Target) -> None:
        """See `ResidentSpeculator.load`."""
        profile, modules = target.profile, target.next_modules()
        if not modules:
            raise ValueError(f"the model of {profile.architecture} reads no modules that predict further tokens")
        self._target, self._module = target, modules[0]
        self._states = torch.zeros(target.slots, profile.hidden_size, device=target.device, dtype=target.dtype)

    def extend(self, batch: ExtendBatch) -> None:
        """Pair each state of the target with the token after it."""
        assert batch.hidden is not None, "the target's states were asked for"
        states = self._step(batch.hidden[:, 0], batch.next_tokens, batch.positions, batch.step)
        self._states[batch.slots] = states[batch.last]

    def draft(self, batch: DraftBatch) -> Drafted:
        """A greedy chain."""
        states = self._states[batch.slots]
        tokens = [self._best(states)]
        for place in range(max(batch.rooms) - 1):
            positions = batch.positions + place
            states = self._step(states, tokens[-1], positions, batch.step(place, positions[:, None]))
            tokens.append(self._best(states))
        return Drafted(tokens=torch.stack(tokens, 1))

    def weight_bytes(self) -> int:
        """See `ResidentSpeculator.weight_bytes`."""
        return self._module.weight_bytes()

    def _step(self, states: Tensor, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        """States [T, hidden] at positions int64 [T] and the tokens int64 [T] after them -> the states after those."""
        return self._module(states, self._target.embed(tokens), positions, step)

    def _best(self, states: Tensor) -> Tensor:
        return self._target.logits(states).argmax(-1)


def _one_layer(profile: ModelProfile, dtype: str) -> AttentionShape:
    """The attention of a layer like the target's own."""
    return replace(AttentionShape.of(profile, dtype), windows=(None,), expanded=None)


__all__ = ["MtpSpeculator"]
