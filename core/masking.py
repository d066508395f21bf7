"""The constraints of a runner's slots: masks are filled on a thread while the forward pass runs, and are there when the
logits are.

    masking.begin(entries, tokens)      before the forward pass; the tokens of the step before are known
    masks = masking.finish()            before sampling
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.batch import Admission, Entry
from engine.constraint import Constraint, Mask
from engine.grammars import FILLERS, Grammars
from engine.specs.speculator import Draft


@dataclass(frozen=True, slots=True)
class SlotMasks:
    """What one slot may sample: a mask per row, int32 [words] on the device, or None where anything may come."""

    rows: Sequence[Tensor | None] = ()
    fault: str = ""  # why the request can't go on

    def row(self, i: int) -> Tensor | None:
        """The mask of the slot's i-th row; rows behind a draft that can't stand have none."""
        return self.rows[i] if i < len(self.rows) else None


UNMASKED = SlotMasks()

Work = Sequence[tuple[int, Constraint | str, NDArray[np.int64], int, Draft]]
"""Slot, constraint (or why there is none), the slot's tokens, position to sample at, what is drafted from there on."""

_Filled = dict[int, list[Mask | None] | str]

_LEAST = 8
"""Slots that one thread is worth."""


class Masking:
    """Belongs to one runner.

    Args:
        grammars: None when this engine has no grammar component; then no request is constrained.
    """

    def __init__(self, grammars: Grammars | None, device: torch.device) -> None:
        self._grammars, self._device = grammars, device
        self._constraints: dict[int, Constraint | str] = {}  # by slot; a text says why there is none
        self._pending: list[Future[_Filled]] = []

    def admit(self, admission: Admission) -> None:
        """A request takes a slot; the output that it has already is followed before the next mask."""
        self._constraints.pop(admission.slot, None)
        structured = admission.params.structured
        if structured is None or self._grammars is None:
            return
        try:
            matcher = self._grammars.matcher(structured)
        except Exception as error:  # as the request was told already, unless this runner compiles by itself
            self._constraints[admission.slot] = str(error)
            return
        self._constraints[admission.slot] = Constraint(
            matcher,
            admission.prompt_len,
            self._grammars.tokens,
            after=structured.after,
            ignore_eos=admission.params.ignore_eos,
        )

    def begin(self, entries: Sequence[Entry], tokens: NDArray[np.int64]) -> None:
        """Start filling the masks of a step.

        Args:
            tokens: of every slot, [slots, max_len]; rows of constrained slots must not change before `finish`.
        """
        self._pending = []
        if not self._constraints or self._grammars is None:
            return
        work = [
            (e.slot, constraint, tokens[e.slot], e.start + e.count - len(e.drafts), Draft(e.drafts, e.draft_parents))
            for e in entries
            if e.samples and (constraint := self._constraints.get(e.slot)) is not None
        ]
        share = max(_LEAST, -(-len(work) // FILLERS))
        for at in range(0, len(work), share):
            self._pending.append(self._grammars.aside(partial(_fill, work[at : at + share])))

    def finish(self) -> Mapping[int, SlotMasks]:
        """The masks of the step by slot; constrained slots only."""
        filled: _Filled = {}
        for part in self._pending:
            filled |= part.result()
        self._pending = []
        flat = [mask for masks in filled.values() if not isinstance(masks, str) for mask in masks if mask is not None]
        rows = iter(torch.from_numpy(np.stack(flat)).to(self._device, non_blocking=True) if flat else ())
        return {
            slot: SlotMasks(fault=masks)
            if isinstance(masks, str)
            else SlotMasks([None if mask is None else next(rows) for mask in masks])
            for slot, masks in filled.items()
        }


def _fill(work: Work) -> _Filled:
    found: _Filled = {}
    for slot, constraint, tokens, first, draft in work:
        try:
            found[slot] = constraint if isinstance(constraint, str) else constraint.masks(tokens, first, draft)
        except ValueError as error:
            found[slot] = str(error)
        except BaseException as error:  # a stranger's code, whose panics may be no Exception: only this request suffers
            found[slot] = f"the grammar component failed: {type(error).__name__}: {error}"
    return found


__all__ = ["UNMASKED", "Masking", "SlotMasks"]
