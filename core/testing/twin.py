"""A target of a few matrices and its twin, a resident: the same decoder with KV of its own.

The twin's greedy chains are all accepted just if its pages hold what they should, behind whatever happened to them.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from engine.plugin import KVKind
from engine.specs.attention import AttentionShape
from engine.specs.model import Forward, Model
from engine.specs.speculator import (
    Checkpoint,
    DraftBatch,
    Drafted,
    ExtendBatch,
    ResidentPlan,
    ResidentSpeculator,
    Target,
)
from engine.testing.grammar import TABLE

VOCAB: Final = len(TABLE.tokens)
WIDTH: Final = 16
HEADS: Final = 2
LAYERS: Final = 2

SHAPE: Final = AttentionShape(
    kind=KVKind.GQA,
    heads=HEADS,
    kv_heads=1,
    head_dim=8,
    v_head_dim=8,
    scale=0.5,
    windows=(None, None),
    softcap=None,
    dtype="float32",
)


class Small(Model):
    """A decoder of a few matrices."""

    def __init__(self, seed: int = 1) -> None:
        draw = torch.Generator().manual_seed(seed)
        self._table = torch.randn(VOCAB, WIDTH, generator=draw)
        self._places = torch.randn(400, WIDTH, generator=draw) * 0.7
        self._head = torch.randn(VOCAB, WIDTH, generator=draw)
        self._qkv = torch.randn(LAYERS, (HEADS + 2) * 8, WIDTH, generator=draw) * 0.5
        self._out = torch.randn(LAYERS, WIDTH, HEADS * 8, generator=draw) * 0.7

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        x = self._table[tokens] + self._places[positions]
        for layer in range(LAYERS):
            step.tap(layer, x)
            q, k, v = (x @ self._qkv[layer].T).view(len(x), HEADS + 2, 8).split_with_sizes((HEADS, 1, 1), dim=1)
            x = x + torch.tanh(step.attend(layer, q, k, v).flatten(1) @ self._out[layer].T)
        step.tap(LAYERS, x)
        return torch.nn.functional.normalize(x, dim=-1)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._head.T * 2.0

    def embed(self, tokens: Tensor) -> Tensor:
        return self._table[tokens]

    def weight_bytes(self) -> int:
        return 0


class Twin(ResidentSpeculator):
    """Drafts chains, trees of six nodes, or chains that it draws, with their probabilities."""

    def __init__(self, tree: bool = False, probs: bool = False) -> None:
        self.model, self.tree, self.probs = Small(), tree, probs

    def plan(self, checkpoint: Checkpoint | None = None) -> ResidentPlan:
        return ResidentPlan(kv=SHAPE, places=8)

    def load(self, target: Target) -> None:
        """Made already."""

    def extend(self, batch: ExtendBatch) -> None:
        self.model.forward(batch.tokens, batch.positions, batch.step)

    def draft(self, batch: DraftBatch) -> Drafted:
        return self._tree(batch) if self.tree else self._chain(batch)

    def _chain(self, batch: DraftBatch) -> Drafted:
        tokens, found, probs = batch.tokens, [], []
        for place in range(max(batch.rooms)):
            positions = batch.positions + place
            hidden = self.model.forward(tokens, positions, batch.step(place, positions[:, None]))
            logits = self.model.logits(hidden)
            tokens = logits.argmax(-1)
            probs.append(logits.softmax(-1))
            if self.probs:
                tokens = torch.multinomial(probs[-1], 1)[:, 0]
            found.append(tokens)
        return Drafted(tokens=torch.stack(found, 1), probs=torch.stack(probs, 1) if self.probs else None)

    def _tree(self, batch: DraftBatch) -> Drafted:
        """Two levels: the second best and the best, then the best two behind each; four nodes and six in all."""
        rows = len(batch.tokens)
        best = self._best(batch.tokens[:, None], batch, 0, batch.positions[:, None], torch.ones(rows, 1, 1).bool())
        first = best[:, 0].flip(1)  # [R, 2]
        sees = torch.tensor([[True, True, False], [True, False, True]]).expand(rows, 2, 3)
        second = self._best(first, batch, 1, (batch.positions + 1)[:, None].expand(rows, 2), sees)  # [R, 2, 2]
        tokens = torch.cat((first, second[:, 1], second[:, 0]), 1)
        return Drafted(tokens=tokens, parents=torch.tensor([-1, -1, 1, 1, 0, 0]).expand(rows, 6))

    def _best(self, tokens: Tensor, batch: DraftBatch, first: int, positions: Tensor, sees: Tensor) -> Tensor:
        step = batch.step(first, positions, sees)
        hidden = self.model.forward(tokens.flatten(), positions.flatten(), step)
        return self.model.logits(hidden).topk(2).indices.view(*tokens.shape, 2)


__all__ = ["HEADS", "LAYERS", "SHAPE", "VOCAB", "WIDTH", "Small", "Twin"]
