"""Launching the kernels of routed experts: how they are cut, and what a step allocates.

Imported only where a CUDA device was chosen. Every launch may be captured in a graph: grids depend on the number of
tokens alone, never on where the router sends them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.ops.dependent import EARLY
from engine.ops.experts import Stack
from engine.ops.triton_experts import EACH, SORTED, WHOLE, grouped
from engine.ops.triton_routing import arrange, choose
from engine.routing import Routing

CHOOSERS: Final = 16
"""Tokens that one program of the router looks at."""

MOST_TILES: Final = 8192


@dataclass(frozen=True, slots=True)
class Tiling:
    """How one product is cut."""

    rows: int  # of the weight, a program
    depth: int  # of k, a round
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class Cut:
    """How both products of one number of tokens are cut."""

    block: int  # slots, a program
    up: Tiling
    down: Tiling


@dataclass(frozen=True, slots=True)
class Order:
    """Slots in blocks of one expert each, see `arrange`; one token needs none, each of its slots is a block."""

    blocks: int
    rows: Tensor  # int32 [blocks, slots of a block]
    owners: Tensor  # int32 [blocks]
    ids: Tensor  # int32 [slots]
    kind: int  # EACH, SORTED or WHOLE
    always: int  # experts that every token takes; theirs are the first blocks
    per: int  # blocks of each of them


class Router:
    """Chooses experts; keeps what its kernel counts with."""

    def __init__(self, device: torch.device) -> None:
        self._counters = torch.zeros(MOST_TILES, dtype=torch.int32, device=device)

    def __call__(self, x: Tensor, router: Tensor, correction: Tensor | None, rule: Routing) -> tuple[Tensor, Tensor]:
        """See `Ops.route`; ids are int32."""
        tokens, hidden = x.shape
        ids = torch.empty(tokens, rule.taken, dtype=torch.int32, device=x.device)
        weights = torch.empty(tokens, rule.taken, dtype=torch.float32, device=x.device)
        size, tiles = rule.experts // rule.groups, triton.cdiv(tokens, CHOOSERS)
        groups_pad, size_pad = triton.next_power_of_2(rule.groups), triton.next_power_of_2(size)
        if groups_pad * size_pad < 16:  # what the tensor cores' product needs at least
            size_pad = 16 // groups_pad
        wide = groups_pad * size_pad
        depth = min(128 if wide <= 64 else 64, max(16, triton.next_power_of_2(hidden)))
        split = max(1, min(8, hidden // (2 * depth))) if tiles <= 16 else 1
        partials = torch.empty(tiles * split * CHOOSERS * wide if split > 1 else 1, device=x.device)
        choose[(tiles, split)](
            x,
            router,
            router if correction is None else correction,
            ids,
            weights,
            partials,
            self._counters,
            tokens,
            x.stride(0),
            hidden,
            rule.scale,
            TOKENS=CHOOSERS,
            GROUPS=rule.groups,
            GROUPS_PAD=groups_pad,
            SIZE=size,
            SIZE_PAD=size_pad,
            CHOSEN=rule.chosen,
            CHOSEN_GROUPS=rule.chosen_groups,
            ALWAYS=rule.always,
            COLUMNS=triton.next_power_of_2(rule.taken),
            DEPTH=depth,
            SPLIT=split,
            AHEAD=max(64, triton.next_power_of_2(triton.cdiv(hidden, split))),
            SIGMOID=rule.scoring == "sigmoid",
            CORRECTED=correction is not None,
            NORMALIZE=rule.normalize,
            PRECISION=precision(x),
            EARLY=EARLY,
            num_warps=4,
            num_stages=3,
            launch_pdl=EARLY,
        )
        return ids, weights


def mix(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Stack, down: Stack, always: int) -> Tensor:
    """See `Ops.mix`; ids int32 [T, taken], dense. The parts [T, taken, hidden] are what is not summed yet."""
    tokens, taken = ids.shape
    experts, width, inner = down.values.shape
    cut = choose_cut(tokens, taken, experts)
    order = _arrange(ids, experts, cut.block, always)
    active = torch.empty(tokens * taken, inner, dtype=x.dtype, device=x.device)
    made = torch.empty(tokens, taken, width, dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, active, order, cut.block, cut.up, share=taken, gated=True)
    _multiply(active, down, made.view(-1, width), order, cut.block, cut.down, factors=weights)
    return made


def multiply_scaled(x: Tensor, weight: Stack, *, gated: bool = False) -> Tensor:
    """x W^T, [T, in] -> [T, out], for a stack of one matrix; `gated` as in `Linear.gated`.

    Values are converted in registers and sums multiplied by the scales in float32, so that nothing is rounded but x,
    as it came, and the result.
    """
    tokens, out = x.shape[0], weight.values.shape[1]
    y = torch.empty(tokens, out // 2 if gated else out, dtype=x.dtype, device=x.device)
    cut = choose_cut(tokens, 1, 1)
    blocks = triton.cdiv(tokens, cut.block)
    order = Order(blocks, x, x, x, WHOLE.value, 0, 1)  # of which nothing is read
    _multiply(x, weight, y, order, cut.block, cut.up, gated=gated)
    return y


def choose_cut(tokens: int, taken: int, experts: int) -> Cut:
    """How to cut for so many tokens; measured on an H200."""
    each = tokens * taken / experts
    if each <= 4:
        return Cut(16, Tiling(64, 128, 4, 3 if tokens == 1 else 4), Tiling(64, 128, 4, 4))
    if each <= 24:
        return Cut(32, Tiling(64, 128, 4, 4), Tiling(64, 128, 4, 4))
    if each <= 64:
        return Cut(64, Tiling(128, 64, 4, 4), Tiling(128, 64, 4, 4))
    return Cut(128, Tiling(128, 64, 8, 3), Tiling(256, 64, 8, 3))


def _arrange(ids: Tensor, experts: int, block: int, always: int) -> Order:
    slots, device = ids.numel(), ids.device
    if ids.shape[0] == 1:
        return Order(slots, ids, ids, ids, EACH.value, always, 1)
    blocks = min(slots, experts + slots // block)
    rows = torch.empty(blocks, block, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    chunk = min(8192, max(16, triton.next_power_of_2(slots)))
    arrange[(experts,)](
        ids,
        rows,
        owners,
        slots,
        blocks,
        EXPERTS=experts,
        PADDED=triton.next_power_of_2(experts + 1),
        ALWAYS=always,
        BLOCK=block,
        CHUNK=chunk,
        EARLY=EARLY,
        num_warps=4 if chunk <= 2048 else 8,
        launch_pdl=EARLY,
    )
    return Order(blocks, rows, owners, ids, SORTED.value, always, triton.cdiv(ids.shape[0], block))


def _multiply(
    x: Tensor,
    weight: Stack,
    y: Tensor,
    order: Order,
    block: int,
    cut: Tiling,
    *,
    share: int = 1,
    gated: bool = False,
    factors: Tensor | None = None,
) -> None:
    _, n, k = weight.values.shape
    scaled = weight.scales is not None
    depth = next((size for size in (cut.depth, 64, 32, 16) if size <= cut.depth and k % size == 0), None)
    if depth is None:
        raise ValueError(f"a weight of {k} columns can't be multiplied on CUDA here; columns come in multiples of 16")
    if scaled:
        depth = math.gcd(depth, weight.side)
    grouped[(triton.cdiv(n, cut.rows), order.blocks)](
        x,
        weight.values,
        weight.values if weight.scales is None else weight.scales,
        y,
        y if factors is None else factors,
        order.ids,
        order.rows,
        order.owners,
        y.shape[0],
        n,
        k,
        x.stride(0),
        order.per,
        ROWS=cut.rows,
        BLOCK=block,
        DEPTH=depth,
        SHARE=share,
        EXPERTS=len(weight.values),
        ALWAYS=order.always,
        AHEAD=triton.next_power_of_2(k) if block <= 32 and not scaled else 0,
        GATED=gated,
        ORDER=order.kind,
        WEIGHTED=factors is not None,
        SCALED=scaled,
        SIDE=weight.side,
        ONCE=block <= 32,
        PRECISION=precision(x),
        STAGES=cut.stages,
        EARLY=EARLY,
        num_warps=cut.warps,
        launch_pdl=EARLY,
    )


def precision(x: Tensor) -> str:
    """Of the products of x: float32 is multiplied as such."""
    return "ieee" if x.dtype is torch.float32 else "tf32"


__all__ = ["Cut", "Router", "Tiling", "choose_cut", "mix", "precision"]
