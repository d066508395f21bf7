"""Conformance of attention backends: random ragged batches against a dense oracle in float64.

The pool starts as NaN, so that whatever reads a slot it was not given shows at once, and every step checks that no page
changed but at the slots it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.capabilities import Flag, KVKind, Mask, Needs
from engine.specs.attention import AttentionBackend, AttentionShape
from engine.testing.attention_bench import Bench
from engine.testing.offer import OfferConformance

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

HEADS = [(4, 4, 16), (9, 3, 64), (8, 1, 64), (4, 2, 128), (2, 2, 80)]  # heads, KV heads, head size
PAGE_SIZES = [1, 8, 16, 64]

SCENARIOS: dict[str, list[dict[str, int]]] = {  # a list of steps: new tokens per request
    "one prefill": [{"a": 37}],
    "ragged prefills": [{"a": 1, "b": 16, "c": 17, "d": 90}],
    "long prefill": [{"a": 700}],
    "decodes": [{"a": 5, "b": 33, "c": 64}, *[{"a": 1, "b": 1, "c": 1}] * 4],
    "mixed": [{"a": 20}, {"a": 1, "b": 31}, {"a": 1, "b": 1, "c": 3}, {"b": 1, "d": 48, "a": 1}],
    "chunks with a prefix in pages": [{"a": 16, "b": 3}, {"a": 21, "b": 30}, {"b": 2, "a": 64}],
    "many decodes": [{f"r{i}": 3 + 5 * i for i in range(20)}, {f"r{i}": 1 for i in range(20)}],
}


def gqa(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **changes: Any) -> AttentionShape:
    """A shape with K and V per KV head, float32 and one full layer unless changed."""
    shape = AttentionShape(
        kind=KVKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5,
        windows=(None,),
        softcap=None,
        dtype="float32",
    )
    return replace(shape, **changes)


def mla(heads: int = 4, head_dim: int = 576, v_head_dim: int = 512, **changes: Any) -> AttentionShape:
    """A shape with one latent row per token."""
    return gqa(heads, 1, head_dim, kind=KVKind.MLA, v_head_dim=v_head_dim, scale=192**-0.5, **changes)


class AttentionConformance(OfferConformance):
    """Subclasses set `offer` and `module`. Runs on the torch device of `device.kind`."""

    def bench(
        self, shape: AttentionShape, page_size: int = 16, masks: frozenset[Mask] = frozenset(), **how: Any
    ) -> Bench:
        """A pool with this backend; skips the test when the offer doesn't claim what is asked."""
        flags = frozenset({Flag.SOFTCAP}) if shape.softcap is not None else frozenset()
        windows = frozenset({Mask.SLIDING_WINDOW}) if any(shape.windows) else frozenset()
        capability = self.device.compute_capability
        needs = Needs(
            device=self.device.kind,
            compute_capability=capability,
            dtype=shape.dtype,
            kv_kind=shape.kind,
            page_size=page_size,
            head_dim=shape.head_dim,
            masks=frozenset({Mask.CAUSAL}) | windows | masks,
            flags=flags,
        )
        self.require(needs)
        backend = self.offer.build(self.options(), shape=shape, page_size=page_size, device=self.device)
        assert isinstance(backend, AttentionBackend)
        return Bench(backend, shape, page_size, torch.device(self.device.kind), **how)

    def play(
        self, bench: Bench, steps: list[dict[str, int]], trees: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Run steps, compare each with the oracle, return their outputs."""
        outs = []
        for number, step in enumerate(steps):
            got, want = bench.step(step, trees if number == len(steps) - 1 else None)
            tolerance = TOLERANCE[bench.shape.dtype]
            torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)
            outs.append(got)
        return outs

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_equals_the_oracle(self, scenario: str) -> None:
        """Every kind of batch, in float32."""
        self.play(self.bench(gqa()), SCENARIOS[scenario])

    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_head_counts_and_sizes(self, heads: tuple[int, int, int]) -> None:
        """Every ratio of query to KV heads."""
        self.play(self.bench(gqa(*heads)), SCENARIOS["mixed"])

    @pytest.mark.parametrize("page_size", PAGE_SIZES)
    @pytest.mark.parametrize("scenario", ["mixed", "chunks with a prefix in pages"])
    def test_page_sizes(self, page_size: int, scenario: str) -> None:
        """Pages of one token, and pages longer than a sequence."""
        self.play(self.bench(gqa(), page_size), SCENARIOS[scenario])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("scenario", ["mixed", "long prefill"])
    def test_low_precision(self, dtype: str, scenario: str) -> None:
        """Within the rounding of the dtype: the inner products may not be accumulated in it."""
        self.play(self.bench(gqa(dtype=dtype)), SCENARIOS[scenario])

    @pytest.mark.parametrize("scenario", ["long prefill", "decodes", "mixed", "chunks with a prefix in pages"])
    def test_windows_differ_by_layer(self, scenario: str) -> None:
        """A window counts the query itself; each layer has its own."""
        self.play(self.bench(gqa(windows=(None, 1, 7, 16, 300))), SCENARIOS[scenario])

    @pytest.mark.parametrize("scenario", ["mixed", "decodes"])
    def test_softcap(self, scenario: str) -> None:
        """Scores go through cap * tanh(score / cap)."""
        self.play(self.bench(gqa(softcap=2.0, scale=1.0)), SCENARIOS[scenario])

    @pytest.mark.parametrize("scenario", ["mixed", "chunks with a prefix in pages"])
    @pytest.mark.parametrize("sizes", [(576, 512), (96, 64)], ids=str)
    def test_mla(self, scenario: str, sizes: tuple[int, int]) -> None:
        """One latent row per token serves as key, and its first columns as value."""
        self.play(self.bench(mla(4, *sizes)), SCENARIOS[scenario])

    @pytest.mark.parametrize("windows", [(None,), (2, None)], ids=str)
    def test_tree(self, windows: tuple[int | None, ...]) -> None:
        """New tokens see the past and, among themselves, what the tree says; siblings share a position."""
        bench = self.bench(gqa(windows=windows), masks=frozenset({Mask.TREE}))
        parents = {"b": [None, 0, 0, 1, 2, 4], "d": [None, None, 1]}
        trees = {name: _tree(tree) for name, tree in parents.items()}
        self.play(bench, [{"a": 9, "b": 20, "c": 4}, {"a": 1, "b": 6, "c": 5, "d": 3}], trees)

    def test_tree_that_is_a_chain_equals_causal(self) -> None:
        """A chain drawn as a tree is the plain mask."""
        steps = [{"a": 30, "b": 2}, {"a": 5, "b": 1}]
        bench = self.bench(gqa(), masks=frozenset({Mask.TREE}))
        drawn = self.play(bench, steps, {"a": _tree([None, 0, 1, 2, 3])})
        plain = self.play(self.bench(gqa()), steps)
        torch.testing.assert_close(drawn[-1], plain[-1], atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("scenario", ["mixed", "many decodes"])
    def test_where_pages_lie_changes_nothing(self, scenario: str) -> None:
        """Two block tables over the same tokens."""
        one = self.play(self.bench(gqa(), placement=1), SCENARIOS[scenario])
        two = self.play(self.bench(gqa(), placement=2), SCENARIOS[scenario])
        for a, b in zip(one, two, strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-6)

    @pytest.mark.parametrize("shape", [gqa(), gqa(windows=(5,)), mla(2, 96, 64)], ids=["full", "window", "mla"])
    def test_chunked_equals_whole(self, shape: AttentionShape) -> None:
        """A prompt cut anywhere gives the rows of the prompt in one piece."""
        (whole,) = self.play(self.bench(shape), [{"a": 75}])
        parts = self.play(self.bench(shape), [{"a": n} for n in (1, 15, 1, 31, 27)])
        torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=2e-5, rtol=2e-5)

    def test_neighbours_change_nothing(self) -> None:
        """A request alone and among others, whose values are huge."""
        (alone,) = self.play(self.bench(gqa()), [{"a": 40}])
        bench = self.bench(gqa())
        bench.magnitude = {"b": 1e3, "c": 1e3}
        among, _ = bench.step({"b": 33, "a": 40, "c": 7})
        torch.testing.assert_close(among[:, 33:73], alone, atol=2e-5, rtol=2e-5)

    @pytest.mark.parametrize("seed", range(8))
    def test_random_traffic(self, seed: int) -> None:
        """Requests come, grow in chunks, decode and leave; pages are used again with what they held before."""
        rng = torch.Generator().manual_seed(seed)
        heads = HEADS[seed % len(HEADS)]
        bench = self.bench(gqa(*heads, windows=(None,)), page_size=16)
        for number in range(12):
            new = {f"r{i}": _draw(rng, [1, 1, 1, 2, 16, 40]) for i in range(6) if _draw(rng, [0, 1, 1])}
            self.play(bench, [new or {"r0": 1}])
            if number % 3 == 2:
                bench.drop(f"r{_draw(rng, range(6))}")


def _draw(rng: torch.Generator, choices: Any) -> int:
    return int(choices[int(torch.randint(len(choices), (), generator=rng))])


def _tree(parents: list[int | None]) -> Tensor:
    """bool [n, n]: each token sees itself and its ancestors."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent is not None:
            sees[child] |= sees[parent]
    return sees


__all__ = ["AttentionConformance", "gqa", "mla"]
