"""A workbench for attention backends: a poisoned pool, requests that grow in it, and a dense oracle in float64.

The backend alone knows what is inside a page, so all KV goes in through `forward`, step by step as in the engine.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from engine.capabilities import KVKind
from engine.eight_bits import rounded
from engine.latent.rows import PackedRows
from engine.latent.up import LatentUp
from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape

POOL_PAGES = 256


class Bench:
    """One pool with one layer per window of the shape, all given the same queries, keys and values.

    Tokens depend only on the request's name and their index in it. `placement` seeds where pages lie. The page that
    rows of a block table are padded with, 0, is given to nobody and stays NaN.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        shape: AttentionShape,
        page_size: int,
        device: torch.device,
        placement: int = 0,
        pages: int = POOL_PAGES,
    ) -> None:
        self.backend, self.shape, self.page_size, self.device, self.pages = backend, shape, page_size, device, pages
        layout = backend.kv_layout()
        dtype = getattr(torch, layout.dtype)
        whole = [tuple(_poisoned((pages + 1, *part), dtype, device) for _, part in layout.parts) for _ in shape.windows]
        self.layers = [tuple(part[1:] for part in kv) for kv in whole]
        self._before = [part[0] for kv in whole for part in kv]  # memory in front of the pool, which is nobody's
        self.up = _up(shape)  # of latent rows, where the shape says how wide they are expanded
        order = torch.randperm(pages - 1, generator=torch.Generator().manual_seed(placement)) + 1
        self.free: list[int] = order.tolist()
        self.tables: dict[str, list[int]] = {}
        self.history: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # q, k, v of all tokens so far, [n, heads, width]
        self.positions: dict[str, Tensor] = {}
        self.magnitude: dict[str, float] = {}
        self.constant = False  # all keys and values are ones

    @property
    def _query_width(self) -> int:
        return self.shape.expanded[0] if self.shape.expanded else self.shape.head_dim

    def drop(self, name: str) -> None:
        """End a request; its pages, as they are, go to whoever comes next."""
        self.free.extend(self.tables.pop(name, []))
        self.history.pop(name, None)
        self.positions.pop(name, None)

    def step(
        self, new: Mapping[str, int], trees: Mapping[str, Tensor] | None = None, padding: int = 0
    ) -> tuple[Tensor, Tensor]:
        """Append tokens to requests and attend in every layer.

        Decodes are moved to the front as the contract has it; apart from that rows come in the order of `new`. Behind
        a step of decodes alone there may be rows of padding, as in a captured step.

        Returns:
            What the backend gave and what the oracle says in float64, both [layers, T, heads, v_head_dim].
        """
        trees = trees or {}
        names = sorted(new, key=lambda name: new[name] != 1 or name in trees)
        for name in names:
            self._grow(name, new[name], trees.get(name))
        batch = _padded(self._batch(names, new, trees), padding)
        before = [tuple(part.clone() for part in kv) for kv in self.layers]
        plan = self.backend.plan(batch)
        q, k, v = self._inputs(names, new, padding)
        got = [self.forward(i, q, k, v, plan)[: len(q) - padding] for i in range(len(self.layers))]
        for out in got:
            assert out.dtype == q.dtype, f"the output is {out.dtype}, the queries are {q.dtype}"
            assert self.up or out.is_contiguous(), "the output is not contiguous"
        for old, kv in zip(before, self.layers, strict=True):
            self._check_canaries(old, kv, batch.slot_mapping[: len(q) - padding])
        width = self.shape.expanded[1] if self.shape.expanded else self.shape.v_head_dim
        nothing = torch.empty(0, self.shape.heads, width, dtype=torch.float64)
        want = [
            torch.cat([nothing, *(self._oracle(n, new[n], window, trees.get(n)) for n in names if new[n])])
            for window in self.shape.windows
        ]
        return torch.stack(got).cpu(), torch.stack(want)

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, plan: Any) -> Tensor:
        """One layer, from plain queries where rows may be expanded."""
        kv = self.layers[layer]
        if self.up is None:
            return self.backend.forward(layer, q, k, v, kv, plan)
        return self.backend.forward_latent(layer, q, k[:, 0], self.up.to(self.device), kv, plan)

    def _grow(self, name: str, count: int, tree: Tensor | None) -> None:
        shape, done = self.shape, len(self.positions.get(name, ()))
        dtype = getattr(torch, shape.dtype)
        size = self.magnitude.get(name, 1.0)

        def draw(what: str, heads: int, width: int) -> Tensor:
            if not count or (self.constant and what != "q"):
                return torch.ones(count, heads, width, dtype=dtype)
            rows = [torch.randn(heads, width, generator=_seeded(f"{what} {name} {done + i}")) for i in range(count)]
            return (torch.stack(rows) * size).to(dtype)

        q, k = draw("q", shape.heads, self._query_width), draw("k", shape.kv_heads, shape.head_dim)
        latent = shape.kind is KVKind.MLA
        if latent and shape.packed:
            packed = PackedRows(shape)
            k = packed.unpack(packed.pack(k))  # which packing again leaves as it is
        v = k[..., : shape.v_head_dim] if latent else draw("v", shape.kv_heads, shape.v_head_dim)
        if shape.packed and not latent:
            k, v = rounded(k), rounded(v)  # likewise
        depth = torch.arange(count) if tree is None else tree.sum(1) - 1 + count - tree.shape[1]
        fresh = (q, k, v)
        if done:
            old = self.history[name]
            fresh = (torch.cat([old[0], q]), torch.cat([old[1], k]), torch.cat([old[2], v]))
        self.history[name] = fresh
        self.positions[name] = torch.cat([self.positions.get(name, torch.empty(0, dtype=torch.long)), done + depth])
        table = self.tables.setdefault(name, [])
        while len(table) * self.page_size < done + count:
            table.append(self.free.pop())

    def _batch(self, names: list[str], new: Mapping[str, int], trees: Mapping[str, Tensor]) -> AttentionBatch:
        counts = [new[name] for name in names]
        lengths = [len(self.positions[name]) for name in names]
        width = max((len(self.tables[name]) for name in names), default=0) + 1
        tables = torch.zeros(len(names), width, dtype=torch.int32)
        slots = [torch.empty(0, dtype=torch.long)]
        for row, name in enumerate(names):
            table = torch.tensor(self.tables[name])
            tables[row, : len(table)] = table
            index = torch.arange(lengths[row] - counts[row], lengths[row])
            slots.append(table[index // self.page_size] * self.page_size + index % self.page_size)
        device = self.device
        return AttentionBatch(
            query_start=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
            seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            slot_mapping=torch.cat(slots).to(device),
            positions=_ends([self.positions[n] for n in names], counts, torch.empty(0, dtype=torch.long)).to(device),
            num_decodes=sum(new[n] == 1 and n not in trees for n in names),
            query_lens_host=np.array(counts, dtype=np.int32),
            seq_lens_host=np.array(lengths, dtype=np.int32),
            tree_masks={names.index(n): tree.to(device) for n, tree in trees.items()} or None,
        )

    def _inputs(
        self, names: list[str], new: Mapping[str, int], padding: int = 0
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Views into one merged projection, as models hand them over: strided rows, dense last axis."""
        shape, counts = self.shape, [new[n] for n in names]
        sizes = (shape.heads, self._query_width), (shape.kv_heads, shape.head_dim), (shape.kv_heads, shape.v_head_dim)
        nothing = [torch.empty(0, *size, dtype=getattr(torch, shape.dtype)) for size in sizes]
        q, k, v = (_ends([self.history[n][i] for n in names], counts, nothing[i]) for i in range(3))
        q, k, v = (torch.cat((part, torch.ones(padding, *part.shape[1:], dtype=part.dtype))) for part in (q, k, v))
        parts = [q, k] if self.shape.kind is KVKind.MLA else [q, k, v]
        merged = torch.cat([part.flatten(1) for part in parts], dim=1).to(self.device)
        views = torch.split(merged, [part.shape[1] * part.shape[2] for part in parts], dim=1)
        heads = [view.view(part.shape) for view, part in zip(views, parts, strict=True)]
        return heads[0], heads[1], heads[2] if len(heads) == 3 else None

    def _check_canaries(self, old: tuple[Tensor, ...], kv: tuple[Tensor, ...], slots: Tensor) -> None:
        """A page may change only where slots were given: at most one token's share of it for each."""
        given = torch.bincount(slots // self.page_size, minlength=self.pages)
        for before, after in zip(old, kv, strict=True):
            changed = (before.view(torch.uint8) != after.view(torch.uint8)).flatten(1).sum(1)
            share = before[0].nbytes // self.page_size
            worst = (changed - given * share).argmax()
            assert changed[worst] <= given[worst] * share, f"page {int(worst)} changed beyond the slots given"
        for memory in self._before:
            assert (
                memory.view(torch.uint8) == _poisoned(memory.shape, memory.dtype, memory.device).view(torch.uint8)
            ).all(), "memory in front of the pool was written"

    def _oracle(self, name: str, count: int, window: int | None, tree: Tensor | None) -> Tensor:
        """Dense attention of the last `count` tokens, float64 [count, heads, v_head_dim]."""
        q, k, v = (part.double() for part in self.history[name])
        if self.up is not None:
            k, v = _expanded(k[:, 0], self.up)
        share = self.shape.heads // k.shape[1]
        k, v = k.repeat_interleave(share, 1), v.repeat_interleave(share, 1)
        scores = torch.einsum("nhd,lhd->hnl", q[-count:], k) * self.shape.scale
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        total = len(k)
        sees = torch.ones(total, total, dtype=torch.bool).tril()[-count:]
        if tree is not None:
            sees[:, -tree.shape[1] :] = tree
        if window is not None:
            where = self.positions[name]
            sees &= where[None, :] > where[-count:, None] - window
        return torch.einsum("hnl,lhd->nhd", scores.masked_fill(~sees, -torch.inf).softmax(-1), v)


def _padded(batch: AttentionBatch, rows: int) -> AttentionBatch:
    """With so many rows of no request behind a batch of decodes."""
    if not rows:
        return batch
    assert batch.num_decodes == len(batch.query_lens_host), "only decodes are padded"

    def longer(tensor: Tensor, value: int) -> Tensor:
        return torch.cat((tensor, tensor.new_full((rows, *tensor.shape[1:]), value)))

    ones = np.ones(len(batch.query_lens_host) + rows, dtype=np.int32)
    return replace(
        batch,
        query_start=torch.arange(len(ones) + 1, dtype=torch.int32, device=batch.query_start.device),
        seq_lens=longer(batch.seq_lens, 0),
        block_tables=longer(batch.block_tables, 0),
        slot_mapping=longer(batch.slot_mapping, -1),
        positions=longer(batch.positions, 0),
        num_decodes=len(ones),
        query_lens_host=ones,
        seq_lens_host=ones * batch.seq_lens_host.max(initial=1),  # the host tells the longest there can be
    )


def _poisoned(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """NaN, also where bytes stand for numbers of any size."""
    count = math.prod(size) * dtype.itemsize
    if dtype.is_floating_point:
        return torch.full(size, torch.nan, dtype=dtype, device=device)
    return torch.full((count,), 255, dtype=torch.uint8, device=device).view(dtype).view(size)


def _up(shape: AttentionShape) -> LatentUp | None:
    """A random projection that keeps the size of what it projects."""
    if shape.expanded is None:
        return None
    nope = shape.expanded[0] - (shape.head_dim - shape.v_head_dim)
    size = shape.heads, nope + shape.expanded[1], shape.v_head_dim
    weight = torch.randn(size, generator=_seeded("up")) * shape.v_head_dim**-0.5
    return LatentUp.of(weight.to(getattr(torch, shape.dtype)), nope)


def _expanded(rows: Tensor, up: LatentUp) -> tuple[Tensor, Tensor]:
    """Keys and values float64 [n, heads, …] of rows [n, latent + rope]."""
    latent, rotary = rows.split_with_sizes((up.key.shape[2], rows.shape[1] - up.key.shape[2]), 1)
    keys = torch.einsum("nl,hpl->nhp", latent, up.key.double())
    shared = rotary[:, None].expand(-1, keys.shape[1], -1)
    return torch.cat((keys, shared), -1), torch.einsum("nl,hvl->nhv", latent, up.value.double())


def _ends(histories: list[Tensor], counts: list[int], nothing: Tensor) -> Tensor:
    """The last rows of each, one below the other."""
    return torch.cat([nothing, *(rows[len(rows) - n :] for rows, n in zip(histories, counts, strict=True))])


def _seeded(what: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(what.encode()))


__all__ = ["Bench"]
