"""How many tokens one pass of the target would give with a head: measured on greedy text, without an engine.

Greedy decoding accepts a draft exactly if it is the text's next token, so the text alone tells what every chain would
have brought, and one unrolling over it drafts all chains at once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.plugins.speculators.eagle.module import EagleModule
from engine.plugins.speculators.eagle.training.attend import FusedUnrolled
from engine.plugins.speculators.eagle.training.target import States


class Exercise(NamedTuple):
    """A prompt and what it is an example of."""

    kind: str
    prompt: str


def read_exercises(path: Path) -> list[Exercise]:
    """JSON lines with `class` and `prompt`.

    Raises:
        ConfigError: the file is absent or a line is something else.
    """
    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [Exercise(line["class"], line["prompt"]) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"evaluation.prompts: {path} must hold JSON lines with class and prompt: {error!r}") from None


@torch.no_grad()
def agreements(head: EagleModule, states: States, tokens: Tensor, draft: int, dtype: torch.dtype) -> Tensor:
    """int64 [B, T]: how many of the `draft` tokens after the pair of each position t and t + 1 the head guesses.

    `states` and `tokens` (int64) are [B, T, …]; the last positions, which lack tokens to compare with, are wrong.
    """
    length = tokens.shape[1]
    positions = torch.arange(length, device=tokens.device).expand(tokens.shape)
    attend, still, found = FusedUnrolled(), torch.ones_like(tokens, dtype=torch.bool), torch.zeros_like(tokens)
    with torch.autocast(tokens.device.type, dtype, enabled=dtype is not torch.float32):
        hidden = head.fuse(states.taps)
        for step in range(draft):
            later = torch.roll(states.embeddings, -1 - step, 1)
            hidden, normed = head(later, hidden, (positions + step).clamp_max(len(head.cos_sin) - 1), attend)
            guess = head.target_ids(head.logits(normed).argmax(-1))
            still &= (guess == torch.roll(tokens, -2 - step, 1)) & (positions + 2 + step < length)
            found += still
    return found


def acceptance(found: Sequence[int] | np.ndarray, start: int, end: int, draft: int) -> tuple[int, int]:
    """Tokens and passes of decoding the text from `start` to `end` with chains; `found` as `agreements` has it.

    The first pass of a chain has token `start` newest. Chains that reach past the end are left out.
    """
    newest, passes = start, 0
    while newest + draft < end:
        newest += int(found[newest - 1]) + 1
        passes += 1
    return newest - start, passes


__all__ = ["Exercise", "acceptance", "agreements", "read_exercises"]
