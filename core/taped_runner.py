"""The runner of a CPU with compiled kernels: short steps are recorded once and then repeated by one native call.

A forward pass of few tokens is some 300 short kernels. Called one by one from Python, with threads that fall asleep in
between, they take half as long again. A tape is kept for each number of tokens; which requests they belong to does not
matter, for that is in the plan of the attention. Results are those of the plain way, to the bit.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.ops.native import AttentionPlan, peaks
from engine.ops.tape import Tape, TapeMemory, record
from engine.runner import Runner

MOST_TOKENS: Final = 64
"""Tokens of the longest step that is taped: longer ones leave nothing to gain."""


class Taped(NamedTuple):
    """A forward pass: where its inputs are written, and where its results come out."""

    tokens: Tensor  # int64 [T]
    positions: Tensor
    tape: Tape[tuple[Tensor, list[Tensor]]]


class TapedRunner(Runner):
    """One rank on a CPU. A number of tokens is taped when it comes up a second time."""

    def __init__(self, *args: Any, **others: Any) -> None:
        super().__init__(*args, **others)
        self._memory = TapeMemory()
        self._seen: dict[tuple[int, bool], Taped | None] = {}
        self._can_tape = True

    def _states(self, tokens: Tensor, positions: Tensor) -> Tensor:
        plan = self._step.plan
        if not self._can_tape or len(tokens) > MOST_TOKENS or not isinstance(plan, AttentionPlan):
            return super()._states(tokens, positions)
        key = len(tokens), self._step.tapping
        if key not in self._seen:
            self._seen[key] = None
            return super()._states(tokens, positions)
        if (taped := self._seen[key]) is None:
            return self._record(key, tokens, positions)
        taped.tokens.copy_(tokens)
        taped.positions.copy_(positions)
        taped.tape.replay(plan.record)
        return self._take(taped.tape.result)

    def _finite(self, logits: Tensor) -> list[bool]:
        return peaks(logits, torch.get_num_threads())[1]

    def _best(self, logits: Tensor) -> list[int]:
        return peaks(logits, torch.get_num_threads())[0]

    def _put(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array))

    def _record(self, key: tuple[int, bool], tokens: Tensor, positions: Tensor) -> Tensor:
        """Compute the step plainly, with a tape running; if none comes of it, no other step is tried."""
        tokens, positions = tokens.clone(), positions.clone()

        def run() -> tuple[Tensor, list[Tensor]]:
            return self.model.forward(tokens, positions, self._step), self._step.tapped

        result, tape = record(run, self._memory, torch.get_num_threads())
        if tape is None:
            self._can_tape = False
        else:
            self._seen[key] = Taped(tokens, positions, tape)
        return self._take(result)

    def _take(self, result: tuple[Tensor, list[Tensor]]) -> Tensor:
        """Results that the next step does not overwrite."""
        hidden, tapped = result
        self._step.tapped = [state.clone() for state in tapped]
        return hidden.clone()


__all__ = ["TapedRunner"]
