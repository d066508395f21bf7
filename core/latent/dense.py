"""Attention over expanded keys and values, merged with what earlier rounds gave: the rule, in plain torch.

Two results over disjoint keys merge by their log-sum-exp L: each is weighted with exp(L_i - L), where L is the
log-sum-exp of both, so any cut of the keys gives the uncut result.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from engine.latent.rounds import Piece
from engine.latent.up import Expanded

TILE_ROWS = 256


class Dense(ABC):
    """Attends from queries to one round of expanded rows."""

    @abstractmethod
    def plan(self, pieces: Sequence[Piece], device: torch.device) -> Any:
        """What the calls for all layers share: which queries of the step see which keys of the round."""

    @abstractmethod
    def attend(self, q: Tensor, expanded: Expanded, plan: Any, scale: float, out: Tensor, stats: Tensor) -> None:
        """Merge the round into `out` and `stats`; a piece that begins with its request's first key replaces them.

        Args:
            q: [T, heads, nope + rope], rows may be strided.
            expanded: the round's keys and values.
            plan: what `plan` returned. A query sees a key unless the key's token is the later one.
            scale: of the scores.
            out: [T, heads, value], float32 or the dtype of q, contiguous.
            stats: float32 [T, heads], log-sum-exp (natural) of the scores so far.
        """


class TorchDense(Dense):
    """For any device; scores and sums in float32, a tile of queries at a time."""

    def plan(self, pieces: Sequence[Piece], device: torch.device) -> Sequence[Piece]:
        return pieces

    def attend(
        self, q: Tensor, expanded: Expanded, plan: Sequence[Piece], scale: float, out: Tensor, stats: Tensor
    ) -> None:
        nope = expanded.keys.shape[-1]
        for piece in plan:
            keys, rotary, values = (part[piece.key : piece.key + piece.keys].float() for part in expanded)
            where = torch.arange(piece.key_position, piece.key_position + piece.keys, device=q.device)
            for start in range(0, piece.queries, TILE_ROWS):
                count = min(TILE_ROWS, piece.queries - start)
                rows = slice(piece.query + start, piece.query + start + count)
                queries = q[rows].float()
                scores = torch.einsum("nhd,lhd->hnl", queries[..., :nope], keys)
                scores += torch.einsum("nhd,ld->hnl", queries[..., nope:], rotary)
                position = torch.arange(piece.position + start, piece.position + start + count, device=q.device)
                scores = (scores * scale).masked_fill(where > position[:, None], float("-inf"))
                found = torch.einsum("hnl,lhd->nhd", scores.softmax(-1), values)
                sums = scores.logsumexp(-1).T
                if piece.key_position:
                    found, sums = merge(out[rows].float(), stats[rows], found, sums)
                out[rows], stats[rows] = found.to(out.dtype), sums


def merge(one: Tensor, one_stats: Tensor, other: Tensor, other_stats: Tensor) -> tuple[Tensor, Tensor]:
    """Results [T, heads, width] and log-sum-exps [T, heads] over two sets of keys -> over both. None is empty."""
    total = torch.logaddexp(one_stats, other_stats)
    weights = (one_stats - total).exp(), (other_stats - total).exp()
    return one * weights[0][..., None] + other * weights[1][..., None], total


__all__ = ["TILE_ROWS", "Dense", "TorchDense", "merge"]
