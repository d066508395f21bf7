"""Routed experts in plain torch: the choice, and the products of the experts that were chosen."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import Ops
from engine.routing import Routing
from engine.specs.quantization import Linear


def route(x: Tensor, weight: Tensor, correction: Tensor | None, rule: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts for the tokens x [T, hidden]: ids int64 [T, chosen] and their weights float32 [T, chosen].

    Scores are float32 products with the router's weight [experts, hidden]. A group counts for its two best experts
    where the choice is corrected by a bias [experts], else for its best one.
    """
    logits = functional.linear(x.float(), weight.float())
    scores = logits.sigmoid() if rule.scoring == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction.float()
    if rule.groups > 1:
        grouped = ranked.view(len(ranked), rule.groups, -1)
        strength = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1) if rule.corrected else grouped.amax(-1)
        kept = torch.zeros_like(strength, dtype=torch.bool)
        kept.scatter_(-1, strength.topk(rule.chosen_groups, -1).indices, True)
        ranked = grouped.masked_fill(~kept[..., None], float("-inf")).flatten(-2)
    ids = ranked.topk(rule.chosen, -1).indices
    weights = scores.gather(-1, ids)
    if rule.normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids, weights * rule.scale


def mix(
    x: Tensor, ids: Tensor, weights: Tensor, gate_ups: Sequence[Linear], downs: Sequence[Linear], ops: Ops
) -> Tensor:
    """The weighted sum of the chosen experts' outputs for x [T, hidden], in float32; each hit expert runs once.

    `gate_ups[e]` holds the rows of gate, then those of up.
    """
    chosen = ids.shape[-1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=len(gate_ups)).tolist()
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert, rows in enumerate(order.split_with_sizes(counts)):
        if len(rows):
            tokens = rows // chosen
            made = downs[expert](ops.silu_mul(gate_ups[expert](x[tokens])))
            out.index_add_(0, tokens, made.float() * weights.flatten()[rows, None])
    return out


__all__ = ["mix", "route"]
