"""How a head drafts: a chain of best guesses, or EAGLE-2's dynamic tree (arXiv 2406.16858).

Both start from the state that the last pair of a request left, and know neither pages nor slots. Called once a step on
the runner's thread; on CUDA nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from engine.plugins.speculators.eagle.head import Head
from engine.specs.speculator import DraftBatch, Drafted


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafting:
    """A head and what it borrows of its target."""

    head: Head
    embed: Callable[[Tensor], Tensor]  # tokens int64 [N] -> [N, hidden]
    logits: Callable[[Tensor], Tensor]  # [N, hidden] -> [N, draft vocabulary]

    def chain(self, batch: DraftBatch, states: Tensor, outs: Tensor, length: int) -> Drafted:
        """The best token after each other: `length` for every request.

        Args:
            states: [R, hidden], what the next step takes; overwritten.
            outs: [R, hidden], what `logits` takes.
        """
        tokens = [self._best(outs)]
        for place in range(length - 1):
            positions = batch.positions + place
            forward = batch.step(place, positions[:, None])
            states, outs = self.head.step(self.embed(tokens[-1]), states, positions, partial(forward.attend, 0))
            tokens.append(self._best(outs))
        return Drafted(tokens=torch.stack(tokens, 1))

    def tree(self, batch: DraftBatch, states: Tensor, outs: Tensor, *, nodes: int, width: int, depth: int) -> Drafted:
        """The `nodes` likeliest continuations, best first, of a tree that is grown `width` wide.

        A node's score is the head's probability of the whole path to it. Each level keeps the `width` best nodes and
        gives each its `width` best children; all that were ever made compete for the draft. A child never scores above
        its parent, so the best ones are a tree whichever way they are cut.

        Args:
            states, outs: as for `chain`.
            depth: most tokens of a path.
        """
        tree = _Growing(self._children(outs[:, None], width))
        states = states[:, None].expand(-1, width, -1)
        for level in range(1, depth):
            places = width * (level - 1)
            positions = (batch.positions + (level - 1))[:, None].expand(-1, width).contiguous()
            forward = batch.step(places, positions, tree.sees)
            flat, outs = self.head.step(
                self.embed(tree.tokens.flatten()),
                states.reshape(-1, states.shape[-1]).contiguous(),  # the head writes into it
                positions.flatten(),
                partial(forward.attend, 0),
            )
            came_from = tree.grow(self._children(outs.view(len(positions), width, -1), width))
            states = flat.view(len(positions), width, -1).gather(1, came_from[..., None].expand(states.shape))
        return tree.best(nodes)

    def _best(self, outs: Tensor) -> Tensor:
        """[R, hidden] -> the target's id of each row's likeliest token, int64 [R]."""
        return self._ids(self.logits(outs).argmax(-1))

    def _children(self, outs: Tensor, width: int) -> tuple[Tensor, Tensor]:
        """[R, F, hidden] -> ids and log-probabilities of each node's best children, [R, F, width] each."""
        logits = self.logits(outs.flatten(0, 1)).float()
        best = torch.log_softmax(logits, -1).topk(width, -1)
        shape = (*outs.shape[:2], width)
        return self._ids(best.indices).view(shape), best.values.view(shape)

    def _ids(self, draft_ids: Tensor) -> Tensor:
        return draft_ids if self.head.target_ids is None else self.head.target_ids[draft_ids]


class _Growing:
    """A tree under way. Every row is a request; the frontier's nodes are those that are to have children next."""

    def __init__(self, first: tuple[Tensor, Tensor]) -> None:
        """`first`: ids and log-probabilities of the newest token's children, [R, 1, K] each."""
        tokens, scores = (part.flatten(1) for part in first)
        self._width = tokens.shape[1]
        self._tokens, self._scores = [tokens], [scores]
        self._parents = [torch.full_like(tokens, -1)]
        self._made = self._width
        self._frontier = torch.arange(self._width, device=tokens.device).expand(tokens.shape)  # [R, K], node numbers
        self._frontier_scores = scores
        self.tokens = tokens
        self.sees = self._itself().expand(len(tokens), -1, -1)

    def _itself(self) -> Tensor:
        return torch.eye(self._width, dtype=torch.bool, device=self._frontier.device)

    def grow(self, children: tuple[Tensor, Tensor]) -> Tensor:
        """Take in the frontier's children, [R, K, K] each, and move on to the best of them.

        Returns:
            int64 [R, K]: which node of the old frontier each node of the new one follows.
        """
        ids, logs = children
        tokens, scores = ids.flatten(1), (self._frontier_scores[..., None] + logs).flatten(1)
        self._tokens.append(tokens)
        self._scores.append(scores)
        self._parents.append(self._frontier.repeat_interleave(self._width, 1))
        best = scores.topk(self._width, -1)
        came_from = best.indices // self._width
        self._frontier, self._made = best.indices + self._made, self._made + tokens.shape[1]
        self._frontier_scores, self.tokens = best.values, tokens.gather(1, best.indices)
        earlier = self.sees.gather(1, came_from[..., None].expand(-1, -1, self.sees.shape[2]))
        self.sees = torch.cat((earlier, self._itself().expand(len(tokens), -1, -1)), -1)
        return came_from

    def best(self, nodes: int) -> Drafted:
        """The best nodes of all; a parent that scores like its child was made earlier and comes first."""
        scores, parents = torch.cat(self._scores, 1), torch.cat(self._parents, 1)
        order = scores.sort(stable=True, dim=-1, descending=True).indices
        rank = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        order = order[:, :nodes]
        above = parents.gather(1, order)
        ranked = rank.gather(1, above.clamp(min=0)).where(above >= 0, above)
        return Drafted(tokens=torch.cat(self._tokens, 1).gather(1, order), parents=ranked)


__all__ = ["Drafting"]
