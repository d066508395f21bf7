"""How the rows of a step are sampled: after the newest token of each request, and after each of its drafts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine.batch import Admission, Entry
from engine.masking import SlotMasks
from engine.sampler import Row
from engine.trees import path


@dataclass(slots=True)
class Slot:
    """What a slot's request is sampled with."""

    admission: Admission
    bannable: tuple[int, ...]  # ids that may not come before `min_tokens` are there


def rows_of(entry: Entry, slot: Slot, tokens: np.ndarray, masks: SlotMasks) -> list[Row]:
    """The rows of an entry that samples.

    Args:
        tokens: of the slot, int64; drafts stand behind each other, whatever they follow.
    """
    admission = slot.admission
    least = admission.prompt_len + admission.params.min_tokens
    return [
        Row(
            admission.params,
            admission.seed,
            len(history),
            history,
            admission.prompt_len,
            slot.bannable if len(history) < least else (),
            masks.row(row),
        )
        for row, history in enumerate(histories(entry, tokens))
    ]


def histories(entry: Entry, tokens: np.ndarray) -> list[np.ndarray]:
    """The text before each row: what stands, and then the drafts up to the row's."""
    first = entry.start + entry.count - len(entry.drafts)
    if (parents := entry.draft_parents) is None:
        return [tokens[:position] for position in range(first, first + len(entry.drafts) + 1)]
    paths = [path(parents, node) for node in range(len(parents))]
    return [tokens[:first], *(np.concatenate((tokens[:first], tokens[first + np.array(p)])) for p in paths)]


__all__ = ["Slot", "histories", "rows_of"]
