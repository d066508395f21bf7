"""Whether sampled text follows the target's distribution when drafts are verified, by a chi-square test.

The target has four live tokens whose odds depend on the token before; all others are impossible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import product
from typing import Final

import numpy as np
import torch
from torch import Tensor

from engine.sampler import Row
from engine.sampling_params import SamplingParams
from engine.specs.speculator import Draft
from engine.verifier import verify_chain

VOCAB: Final = 64

LIVE: Final = (1, 2, 3, 4)

PROMPT: Final = (1, 2, 1, 2, 1, 2)

TRIALS: Final = 2000

BOUND: Final = 57.0
"""A chi-square of 15 degrees of freedom goes beyond it once in a million."""

PARAMS: Final = SamplingParams(temperature=1.0)


def target(tokens: Sequence[int]) -> Tensor:
    """Logits float32 [VOCAB] after the tokens."""
    logits = torch.full((VOCAB,), -torch.inf)
    for token in LIVE:
        logits[token] = 0.5 * ((3 * tokens[-1] + 2 * token) % 5)
    return logits


def verify(tokens: Sequence[int], draft: Draft, seed: int) -> list[int]:
    """What the engine's verifier emits after the tokens for a chain that was drafted."""
    chains = [list(draft.tokens[:i]) for i in range(len(draft.tokens) + 1)]
    logits = torch.stack([target([*tokens, *chain]) for chain in chains])
    rows = []
    for chain in chains:
        seen = np.array([*tokens, *chain], dtype=np.int64)
        rows.append(Row(PARAMS, seed, len(seen), seen, len(PROMPT)))
    return verify_chain(logits, rows, list(draft.tokens), draft.probs)


def check_distribution(propose: Callable[[str, list[int]], Draft]) -> None:
    """Assert that the first two tokens of many requests are distributed as the target alone would have them.

    Args:
        propose: request id and tokens -> a draft of at most two tokens; trees are followed along their first branch.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(TRIALS):
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + 2:
            tokens += verify(tokens, chain(propose(f"trial {seed}", list(tokens))), seed)
        counts[tokens[len(PROMPT)], tokens[len(PROMPT) + 1]] += 1
    assert set(counts) <= set(product(LIVE, LIVE)), "a token came out that the target never says"
    chi_square = 0.0
    for first, second in product(LIVE, LIVE):
        odds = target(PROMPT).softmax(-1)[first] * target([*PROMPT, first]).softmax(-1)[second]
        expected = TRIALS * float(odds)
        chi_square += (counts[first, second] - expected) ** 2 / expected
    assert chi_square < BOUND, f"chi-square {chi_square:.0f} over 16 pairs: the text is not the target's"


def chain(draft: Draft) -> Draft:
    """The first branch of a tree; a chain as it is."""
    if draft.parents is None:
        return draft
    branch: list[int] = []
    for at, parent in enumerate(draft.parents):
        if parent == (branch[-1] if branch else None):
            branch.append(at)
    return Draft([draft.tokens[at] for at in branch], None, None if draft.probs is None else draft.probs[branch])


__all__ = ["VOCAB", "check_distribution"]
