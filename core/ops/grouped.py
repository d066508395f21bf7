"""Launching the kernels of routed experts: how they are cut, and what a step allocates.

Imported only where a CUDA device was chosen. Every launch may be captured in a graph: grids depend on the number of
tokens alone, never on where the router sends them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from engine.ops.dependent import EARLY
from engine.ops.experts import Stack
from engine.ops.triton_experts import grouped, total
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
    arranged: bool


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
        depth = min(128, max(16, triton.next_power_of_2(hidden)))
        split = max(1, min(8, hidden // (2 * depth))) if tiles <= 16 else 1
        wide = groups_pad * size_pad
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
            SIGMOID=rule.scoring == "sigmoid",
            CORRECTED=correction is not None,
            NORMALIZE=rule.normalize,
            PRECISION=_precision(x),
            EARLY=EARLY,
            num_warps=4,
            num_stages=3,
            launch_pdl=EARLY,
        )
        return ids, weights


def mix(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Stack, down: Stack) -> Tensor:
    """See `Ops.mix`; ids int32 [T, taken], dense. What the experts make is rounded to x's dtype before it is summed."""
    tokens, taken = ids.shape
    experts, width, inner = down.values.shape
    cut = choose_cut(tokens, taken, experts)
    order = _arrange(ids, experts, cut.block)
    active = torch.empty(tokens * taken, inner, dtype=x.dtype, device=x.device)
    made = torch.empty(tokens * taken, width, dtype=x.dtype, device=x.device)
    _multiply(x, gate_up, active, order, cut.block, cut.up, share=taken, gated=True)
    _multiply(active, down, made, order, cut.block, cut.down, factors=weights)
    out = torch.empty_like(x)
    total[(tokens, triton.cdiv(width, 1024))](made, out, width, SHARE=taken, BLOCK=1024, EARLY=EARLY, launch_pdl=EARLY)
    return out


def choose_cut(tokens: int, taken: int, experts: int) -> Cut:
    """How to cut for so many tokens; measured on an H200."""
    each = tokens * taken / experts
    if each <= 12:
        return Cut(16, Tiling(64, 128, 4, 3), Tiling(64, 128, 4, 3))
    if each <= 24:
        return Cut(32, Tiling(64, 128, 4, 3), Tiling(64, 128, 4, 3))
    if each <= 64:
        return Cut(64, Tiling(128, 64, 4, 4), Tiling(128, 64, 4, 4))
    return Cut(128, Tiling(128, 64, 8, 4), Tiling(128, 64, 8, 4))


def _arrange(ids: Tensor, experts: int, block: int) -> Order:
    slots, device = ids.numel(), ids.device
    if ids.shape[0] == 1:
        return Order(slots, ids, ids, ids, arranged=False)
    blocks = min(slots, experts + slots // block)
    rows = torch.empty(blocks, block, dtype=torch.int32, device=device)
    owners = torch.empty(blocks, dtype=torch.int32, device=device)
    chunk = min(2048, max(16, triton.next_power_of_2(slots)))
    arrange[(experts,)](
        ids,
        rows,
        owners,
        slots,
        blocks,
        EXPERTS=triton.next_power_of_2(experts + 1),
        BLOCK=block,
        CHUNK=chunk,
        EARLY=EARLY,
        num_warps=4,
        launch_pdl=EARLY,
    )
    return Order(blocks, rows, owners, ids, arranged=True)


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
    depth = next(size for size in (cut.depth, 64, 32, 16, 8, 4, 2, 1) if k % size == 0 and size <= cut.depth)
    if scaled:
        depth = min(depth, weight.side)
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
        ROWS=cut.rows,
        BLOCK=block,
        DEPTH=depth,
        SHARE=share,
        GATED=gated,
        SORTED=order.arranged,
        WEIGHTED=factors is not None,
        SCALED=scaled,
        SIDE=weight.side,
        ONCE=block <= 32,
        PRECISION=_precision(x),
        STAGES=cut.stages,
        EARLY=EARLY,
        num_warps=cut.warps,
        launch_pdl=EARLY,
    )


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype is torch.float32 else "tf32"


__all__ = ["Cut", "Router", "Tiling", "choose_cut", "mix"]
