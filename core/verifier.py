"""Which draft tokens the target model accepts.

Exact for any draft: the tokens that come out follow the target's distribution, whatever was proposed. A draft that is a
point mass is verified by sampling the target itself at every position: the draft token is kept if the target's own
sample equals it, which happens with the target's probability of it, and the sample is otherwise the replacement that
rejection sampling would draw. So the text of a seeded request is the same with and without such a speculator. A draft
that was itself sampled goes through rejection sampling (Leviathan et al., 2023; Chen et al., 2023).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.randomness import Stream, uniform
from engine.sampler import Row, distribution, draw, reshape, sample


def verify_chain(
    logits: Tensor, rows: Sequence[Row], drafts: Sequence[int], draft_probs: Tensor | None = None
) -> list[int]:
    """Tokens to emit for one request: the accepted drafts, then one more.

    Args:
        logits: float32 [len(drafts) + 1, vocab]; row i follows the drafts before i. May be overwritten.
        rows: what each row is sampled with; its history contains the drafts before it.
        drafts: the chain.
        draft_probs: the distribution each draft was sampled from, [len(drafts), vocab]; None for point masses.
    """
    if draft_probs is None:
        return accept_equal(sample(logits, rows), drafts)
    for i, row in enumerate(rows):
        if row.reshaped:
            reshape(logits[i], row)
    target = distribution(logits, rows)
    emitted: list[int] = []
    for i, token in enumerate(drafts):
        row, q = rows[i], draft_probs[i].to(target)
        p_token, q_token = float(target[i, token]), float(q[token])
        if uniform(row.seed, row.position, Stream.ACCEPT) * q_token < p_token:
            emitted.append(token)
            continue
        residual = torch.clamp(target[i] - q, min=0.0)
        if not float(residual.sum()) > 0.0:  # p and q agree up to rounding, so any sample of p will do
            residual = target[i]
        return [*emitted, *draw(residual.unsqueeze(0), [uniform(row.seed, row.position)])]
    last = rows[len(drafts)]
    return [*emitted, *draw(target[-1:], [uniform(last.seed, last.position)])]


def accept_equal(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The target's own samples up to and including the first that differs from the draft."""
    agreed = 0
    while agreed < len(drafts) and sampled[agreed] == drafts[agreed]:
        agreed += 1
    return list(sampled[: agreed + 1])


__all__ = ["accept_equal", "verify_chain"]
