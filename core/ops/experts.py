"""Routed experts in plain torch: the choice, and the products of the experts that were chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from engine.ops import Ops
from engine.routing import Routing
from engine.specs.quantization import Experts, Linear
from engine.specs.weight_loader import WeightSource

GRAIN: Final = 16
"""Kernels multiply runs of so many columns."""


@dataclass(frozen=True, slots=True)
class Stack:
    """One projection of all experts of a layer: values [experts, out, in].

    With `scales`, float32 [experts, ceil(out / side), ceil(in / side)], each block of side x side values is multiplied
    by its scale.
    """

    values: Tensor
    scales: Tensor | None = None
    side: int = 1

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self.values.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def dense(self, expert: int, dtype: torch.dtype) -> Tensor:
        """One expert's matrix [out, in]."""
        values = self.values[expert]
        if self.scales is None:
            return values.to(dtype)
        scales = self.scales[expert]
        for axis in (0, 1):
            scales = scales.repeat_interleave(self.side, axis).narrow(axis, 0, values.shape[axis])
        return (values.float() * scales).to(dtype)


class StackedExperts(Experts):
    """Experts in two tensors, multiplied by `Ops.mix`: rows of gate, then up; and down."""

    def __init__(self, gate_up: Stack, down: Stack) -> None:
        self._gate_up, self._down = gate_up, down

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, ops: Ops, always: int = 0) -> Tensor:
        return ops.mix(x, ids, weights, self._gate_up, self._down, always)

    def weight_bytes(self) -> int:
        return self._gate_up.nbytes + self._down.nbytes


class LinearExperts(Experts):
    """Experts whose projections are linear layers of any quantization; `gate_ups[e]` holds rows of gate, then up."""

    def __init__(self, gate_ups: Sequence[Linear], downs: Sequence[Linear]) -> None:
        self._gate_ups, self._downs = list(gate_ups), list(downs)

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor, ops: Ops, always: int = 0) -> Tensor:
        def run(expert: int, states: Tensor) -> Tensor:
            return self._downs[expert](self._gate_ups[expert].gated(states, ops))

        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return mix_all(x, ids, weights, len(self._downs), run)
        return mix(x, ids, weights, len(self._downs), run)

    def weight_bytes(self) -> int:
        return sum(linear.weight_bytes() for linear in (*self._gate_ups, *self._downs))


def stack(source: WeightSource, names: Sequence[Sequence[str]], dtype: torch.dtype, device: torch.device) -> Stack:
    """The named matrices, those of one expert below each other. Filled in place: nothing is held twice.

    Raises:
        ValueError: the experts are of different shapes.
    """
    shapes = {tuple(source.shape(name) for name in one) for one in names}
    if len(shapes) != 1:
        raise ValueError(f"{source.origin(names[0][0])}: experts of different shapes around tensor {names[0][0]}")
    (shape,) = shapes
    values = torch.empty(len(names), sum(part[0] for part in shape), shape[0][1], dtype=dtype, device=device)
    for expert, one in enumerate(names):
        row = 0
        for name, part in zip(one, shape, strict=True):
            values[expert, row : row + part[0]] = source.get(name, dtype)
            row += part[0]
    return Stack(values)


def stack_scaled(source: WeightSource, names: Sequence[Sequence[str]], device: torch.device | None) -> Stack | None:
    """The same in FP8 with its scales; None where some matrix isn't stored so, begins in a block or is cut too fine."""
    first = [source.scaled(name) for name in names[0]]
    sides = {part.side for part in first if part is not None}
    if None in first or len(sides) != 1:
        return None
    (side,) = sides
    heights = [len(part.values) for part in first if part is not None]
    width = source.shape(names[0][0])[1]
    if any(height % side for height in heights[:-1]) or width % GRAIN or side % GRAIN:
        return None
    values = torch.empty(len(names), sum(heights), width, dtype=torch.float8_e4m3fn, device=device)
    scales = torch.empty(len(names), -(-sum(heights) // side), -(-width // side), device=device)
    for expert, one in enumerate(names):
        row = 0
        for name in one:
            part = source.scaled(name)
            if part is None or part.side != side:
                return None
            values[expert, row : row + len(part.values)] = part.values
            scales[expert, row // side :][: len(part.scales)] = part.scales
            row += len(part.values)
    return Stack(values, scales, side)


def route(x: Tensor, weight: Tensor, correction: Tensor | None, rule: Routing) -> tuple[Tensor, Tensor]:
    """Choose experts for the tokens x [T, hidden]: ids int64 [T, rule.taken] and their weights float32 [T, rule.taken].

    Scores are float32 products with the router's weight [experts, hidden]. A group counts for its two best experts
    where the choice is corrected by a bias [experts], else for its best one. Behind the chosen ones come those that
    every token takes, with weight one.
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
    weights = weights * rule.scale
    if rule.always:
        last = torch.arange(rule.experts, rule.experts + rule.always, device=ids.device).expand(len(ids), -1)
        ids, weights = torch.cat((ids, last), -1), torch.cat((weights, weights.new_ones(last.shape)), -1)
    return ids, weights


def mix(x: Tensor, ids: Tensor, weights: Tensor, experts: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The weighted sums of the chosen experts' outputs for x [T, hidden], summed in float32; each hit expert runs once.

    Waits for the device: how many tokens each expert has must be known here.
    """
    chosen = ids.shape[-1]
    order = ids.flatten().argsort(stable=True)
    counts = ids.flatten().bincount(minlength=experts).tolist()
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert, rows in enumerate(order.split_with_sizes(counts)):
        if len(rows):
            tokens = rows // chosen
            out.index_add_(0, tokens, run(expert, x[tokens]).float() * weights.flatten()[rows, None])
    return out.to(x.dtype)


def mix_all(x: Tensor, ids: Tensor, weights: Tensor, experts: int, run: Callable[[int, Tensor], Tensor]) -> Tensor:
    """The same without waiting for the device: every expert runs for every token."""
    out = x.new_zeros(x.shape, dtype=torch.float32)
    for expert in range(experts):
        factor = torch.where(ids == expert, weights, 0.0).sum(-1, keepdim=True)
        out += torch.where(factor == 0, 0.0, run(expert, x).float() * factor)
    return out.to(x.dtype)


def mix_stacks(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Stack, down: Stack, ops: Ops) -> Tensor:
    """`Ops.mix` in plain torch."""

    def run(expert: int, states: Tensor) -> Tensor:
        inner = ops.silu_mul(functional.linear(states, gate_up.dense(expert, x.dtype)))
        return functional.linear(inner, down.dense(expert, x.dtype))

    return mix(x, ids, weights, len(down.values), run)


__all__ = [
    "LinearExperts",
    "Stack",
    "StackedExperts",
    "mix",
    "mix_all",
    "mix_stacks",
    "route",
    "stack",
    "stack_scaled",
]
