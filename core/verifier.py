"""Which draft tokens the target model accepts.

Exact for any draft, chain or tree: the tokens that come out follow the target's distribution, whatever was proposed.
Drafts that are point masses are verified by sampling the target itself behind every node: the sample is the token that
comes out, and a node is kept if it is that token, which happens with the target's probability of it. So the text of a
seeded request is the same with and without such a speculator. Drafts that were themselves sampled go through rejection
sampling (Leviathan et al., 2023; Chen et al., 2023), siblings one after the other on what the earlier ones leave (Miao
et al., 2024).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor

from engine.randomness import Stream, uniform
from engine.sampler import Row, distribution, draw, maxima, reshape, sample
from engine.specs.speculator import Draft
from engine.trees import Parents, chain, children


class Verified(NamedTuple):
    """What comes of one draft."""

    tokens: list[int]  # the accepted drafts, then one more
    path: list[int]  # the accepted nodes, from the root down


def accept_equal(sampled: Sequence[int], drafts: Sequence[int]) -> list[int]:
    """The target's own samples up to and including the first that differs from the chain."""
    agreed = 0
    while agreed < len(drafts) and sampled[agreed] == drafts[agreed]:
        agreed += 1
    return list(sampled[: agreed + 1])


def follow(sampled: Sequence[int], drafts: Sequence[int], parents: Parents | None = None) -> Verified:
    """The target's own samples along the tree for as long as there is a node that says the same.

    Args:
        sampled: one more than nodes; the first follows the last real token, number i + 1 follows node i.
        drafts: tokens of the nodes.
        parents: as in `Draft`.
    """
    if parents is None:
        emitted = accept_equal(sampled, drafts)
        return Verified(emitted, list(range(len(emitted) - 1)))
    below = {(parent, drafts[node]): node for node, parent in enumerate(parents)}
    emitted, path = [sampled[0]], list[int]()
    while (node := below.get((path[-1] if path else None, emitted[-1]))) is not None:
        path.append(node)
        emitted.append(sampled[node + 1])
    return Verified(emitted, path)


@dataclass(slots=True)
class _Walk:
    """Where the verification of one draft stands."""

    draft: Draft
    first: int  # of its rows
    below: dict[int | None, list[int]]
    tokens: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    tried: int = 0  # children of the last accepted node that were refused

    @property
    def node(self) -> int | None:
        """The last accepted node."""
        return self.path[-1] if self.path else None

    @property
    def row(self) -> int:
        """The row that follows it."""
        return self.first + (0 if self.node is None else self.node + 1)

    @property
    def child(self) -> int | None:
        """The node to be tried next."""
        found = self.below.get(self.node, [])
        return found[self.tried] if self.tried < len(found) else None

    def take(self, node: int) -> None:
        """Accept a child."""
        self.path.append(node)
        self.tokens.append(self.draft.tokens[node])
        self.tried = 0

    def proposal(self, node: int) -> Tensor:
        """The distribution that a child was drawn from, float32 [vocab]: without the siblings drawn before it."""
        assert self.draft.probs is not None, "sampled drafts have probabilities"
        q = self.draft.probs[node]
        if not self.tried:
            return q
        rest = q.clone()
        rest[[self.draft.tokens[sibling] for sibling in self.below[self.node][: self.tried]]] = 0.0
        return rest / rest.sum().clamp(min=torch.finfo(rest.dtype).tiny)


def verify(
    logits: Tensor, rows: Sequence[Row], drafts: Sequence[Draft], best: Callable[[Tensor], list[int]] = maxima
) -> list[Verified]:
    """What comes of the drafts of a step; an empty one is a plain sample.

    Args:
        logits: float32 [N, vocab], of each draft in turn a row behind the last real token and one behind each node;
            overwritten where a row reshapes them.
        rows: [N], what each row is sampled with; the history of a node's row ends with the path to it.
        best: tells the most likely token of each row.
    """
    ends = list(accumulate(len(draft.tokens) + 1 for draft in drafts))
    spans = [range(end - len(draft.tokens) - 1, end) for draft, end in zip(drafts, ends, strict=True)]
    masses = [i for i, draft in enumerate(drafts) if draft.probs is None]
    found: dict[int, Verified] = {}
    if masses:
        whole = len(masses) == len(drafts)
        chosen = [row for i in masses for row in spans[i]]
        sampled = iter(sample(logits if whole else logits[chosen], [rows[row] for row in chosen], best))
        for i in masses:
            found[i] = follow(list(islice(sampled, len(spans[i]))), drafts[i].tokens, drafts[i].parents)
    if drawn := [i for i in range(len(drafts)) if i not in found]:
        chosen = [row for i in drawn for row in spans[i]]
        target = reshaped(logits[chosen], [rows[row] for row in chosen])
        walked = verify_sampled(target, [rows[row] for row in chosen], [drafts[i] for i in drawn])
        found |= dict(zip(drawn, walked, strict=True))
    return [found[i] for i in range(len(drafts))]


def reshaped(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The distributions that rows sample from, of their raw logits [N, vocab], which are overwritten."""
    for i, row in enumerate(rows):
        if row.reshaped:
            reshape(logits[i], row)
    return distribution(logits, rows)


def verify_sampled(target: Tensor, rows: Sequence[Row], drafts: Sequence[Draft]) -> list[Verified]:
    """Rejection sampling for drafts that come with their probabilities, all of a step at once.

    Args:
        target: float32 [N, vocab], distributions as `engine.sampler.distribution` makes them; of each draft in turn a
            row behind the last real token and one behind each node.
        rows: [N], their seeds and positions.
        drafts: with `probs`.
    """
    walks, first = [], 0
    for draft in drafts:
        walks.append(_Walk(draft, first, children(draft.parents or chain(len(draft.tokens)))))
        first += len(draft.tokens) + 1
    left = target[[walk.row for walk in walks]]
    under_way = [(i, walk, node) for i, walk in enumerate(walks) if (node := walk.child) is not None]
    while under_way:
        _try(target, rows, under_way, left)
        under_way = [(i, walk, node) for i, walk, _ in under_way if (node := walk.child) is not None]
    last = [rows[walk.row] for walk in walks]
    drawn = draw(left, [uniform(row.seed, row.position) for row in last])
    return [Verified([*walk.tokens, token], walk.path) for walk, token in zip(walks, drawn, strict=True)]


def _try(target: Tensor, rows: Sequence[Row], walks: Sequence[tuple[int, _Walk, int]], left: Tensor) -> None:
    """Accept a child of each walk, or take its share out of what is left to draw from.

    Args:
        walks: row of `left`, walk, child.
        left: float32 [all walks, vocab]; overwritten.
    """
    at = torch.tensor([i for i, _, _ in walks], device=left.device)
    tokens = torch.tensor([walk.draft.tokens[node] for _, walk, node in walks], device=left.device).unsqueeze(1)
    chances = [uniform(rows[w.row].seed, rows[w.row].position, Stream.ACCEPT, w.tried) for _, w, _ in walks]
    p, q = left[at], torch.stack([walk.proposal(node) for _, walk, node in walks]).to(left)
    bar = torch.tensor(chances, dtype=torch.float64, device=left.device).unsqueeze(1) * q.gather(1, tokens)
    taken = bar < p.gather(1, tokens)
    rest = torch.clamp(p - q, min=0.0)
    total = rest.sum(1, keepdim=True)
    rest = torch.where(total > 0.0, rest / total, p)  # p and q agree up to rounding, so any sample of p will do
    for (_, walk, node), accepted in zip(walks, taken[:, 0].tolist(), strict=True):
        if accepted:
            walk.take(node)
        else:
            walk.tried += 1
    left[at] = torch.where(taken, target[[walk.row for _, walk, _ in walks]], rest)


__all__ = ["Verified", "accept_equal", "follow", "verify", "verify_sampled"]
