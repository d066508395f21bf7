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
from engine.trees import chain, path
from engine.verifier import verify as verified

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
    """What the engine's verifier emits after the tokens for a draft."""
    texts = texts_before(tokens, draft)
    logits = torch.stack([target(text) for text in texts])
    rows = [Row(PARAMS, seed, len(seen), np.array(seen, dtype=np.int64), len(PROMPT)) for seen in texts]
    return verified(logits, rows, [draft])[0].tokens


def texts_before(tokens: Sequence[int], draft: Draft) -> list[list[int]]:
    """The text that each row of a verification follows: the tokens, and the tokens with the path to each node."""
    parents = chain(len(draft.tokens)) if draft.parents is None else draft.parents
    paths = [path(parents, node) for node in range(len(draft.tokens))]
    return [[*tokens, *(draft.tokens[node] for node in nodes)] for nodes in ([], *paths)]


def check_distribution(propose: Callable[[str, list[int]], Draft]) -> None:
    """Assert that the first two tokens of many requests are distributed as the target alone would have them.

    Args:
        propose: request id and tokens -> a draft of at most two tokens.
    """
    counts: Counter[tuple[int, int]] = Counter()
    for seed in range(TRIALS):
        tokens = list(PROMPT)
        while len(tokens) < len(PROMPT) + 2:
            tokens += verify(tokens, propose(f"trial {seed}", list(tokens)), seed)
        counts[tokens[len(PROMPT)], tokens[len(PROMPT) + 1]] += 1
    assert set(counts) <= set(product(LIVE, LIVE)), "a token came out that the target never says"
    chi_square = 0.0
    for first, second in product(LIVE, LIVE):
        odds = target(PROMPT).softmax(-1)[first] * target([*PROMPT, first]).softmax(-1)[second]
        expected = TRIALS * float(odds)
        chi_square += (counts[first, second] - expected) ** 2 / expected
    assert chi_square < BOUND, f"chi-square {chi_square:.0f} over 16 pairs: the text is not the target's"


__all__ = ["VOCAB", "check_distribution", "texts_before"]
