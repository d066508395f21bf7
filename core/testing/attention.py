"""Conformance of attention backends: random ragged batches against a dense oracle in float64.

The pool starts as NaN, so that whatever reads a slot it was not given shows at once, and every step checks that no page
changed but at the slots it was given. Tolerances follow the dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.capabilities import Flag, KVKind, Layout, Mask, Needs
from engine.specs.attention import AttentionBackend, AttentionShape
from engine.testing.attention_bench import Bench
from engine.testing.attention_cases import COUNT, Case, cases
from engine.testing.attention_shapes import gqa, latent, mla
from engine.testing.claims import proves
from engine.testing.offer import OfferConformance

TOLERANCE = {"float32": 2e-5, "float16": 4e-3, "bfloat16": 3e-2}

HEADS = [(4, 4), (9, 3), (8, 1), (4, 2), (1, 1)]  # heads, KV heads
PAGE_SIZES = [1, 8, 16, 64]
HEAD_DIMS = [16, 64, 80, 128, 256]

WIDEST_HEAD = 256
"""No model has wider keys per head; a wider claim is one of latent rows."""

QUICK = pytest.mark.usefixtures("one_thread")

SCENARIOS: dict[str, list[dict[str, int]]] = {  # a list of steps: new tokens per request
    "one prefill": [{"a": 37}],
    "ragged prefills": [{"a": 1, "b": 16, "c": 17, "d": 90}],
    "long prefill": [{"a": 700}],
    "decodes": [{"a": 5, "b": 33, "c": 64}, *[{"a": 1, "b": 1, "c": 1}] * 4],
    "mixed": [{"a": 20}, {"a": 1, "b": 31}, {"a": 1, "b": 1, "c": 3}, {"b": 1, "d": 48, "a": 1}],
    "chunks with a prefix in pages": [{"a": 16, "b": 3}, {"a": 21, "b": 30}, {"b": 2, "a": 64}],
    "many decodes": [{f"r{i}": 3 + 5 * i for i in range(20)}, {f"r{i}": 1 for i in range(20)}],
}

EXPANDED: dict[str, list[dict[str, int]]] = {
    "one prefill": [{"a": 300}],
    "prompts among decodes": [{"a": 90, "b": 20}, {"a": 1, "b": 120, "c": 3, "d": 100}, {"a": 1, "b": 1}],
    "chunks behind a prefix": [{"a": 16, "b": 3}, {"a": 21, "b": 30}, {"b": 2, "a": 64}, {"b": 70}],
}

SMALLEST: list[list[dict[str, int]]] = [
    [{"a": 1}],
    [{"a": 1, "b": 1}, {"a": 1, "b": 1}],
    [{"a": 9, "b": 4}, {"a": 1, "b": 0}, {"b": 2, "a": 0}],
    [{"a": 5}, {}, {"a": 1}],
]


class AttentionConformance(OfferConformance):
    """Subclasses set `offer` and `module`. Runs on the torch device of `device.kind`.

    Shapes, dtypes and page sizes are those that the offer claims, the usual ones where it claims no limit.
    """

    largest_batch: ClassVar[int] = 24
    """Every batch of decodes up to this size is tried."""

    grid: ClassVar[int] = COUNT
    """Cases of `test_shapes_equal_the_oracle`; fewer where a kernel is interpreted."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """The limits of the offer, and the grid of shapes."""
        super().pytest_generate_tests(metafunc)
        self.each(metafunc, "page_size", "page_sizes", PAGE_SIZES)
        self.each(metafunc, "dtype", "dtypes", sorted(TOLERANCE))
        self.each(metafunc, "head_dim", "head_dims", HEAD_DIMS)
        if "case" in metafunc.fixturenames:
            grid = cases(self.offer.capabilities, self.shape())[:: max(1, COUNT // self.grid)]
            self.cases(metafunc, "case", [pytest.param(case, marks=proves(case.claim), id=str(case)) for case in grid])
        self.cases(metafunc, "batch_size", range(1, self.largest_batch + 1))

    def shape(self, **changes: Any) -> AttentionShape:
        """A shape that the offer claims: float32, K and V per head and a head size of 64 if it can."""
        can = self.offer.capabilities
        dtype = "float32" if not can.dtypes or "float32" in can.dtypes else min(can.dtypes)
        if can.kv_kinds and KVKind.GQA not in can.kv_kinds:
            row = min(can.head_dims) if can.head_dims and 576 not in can.head_dims else 576
            return mla(4, row, row - 64, **{"dtype": dtype} | changes)
        head_dim = min(can.head_dims) if can.head_dims and 64 not in can.head_dims else 64
        return gqa(**{"head_dim": head_dim, "scale": head_dim**-0.5, "dtype": dtype} | changes)

    def bench(
        self, shape: AttentionShape, page_size: int | None = None, masks: frozenset[Mask] = frozenset(), **how: Any
    ) -> Bench:
        """A pool with this backend; skips the test when the offer doesn't claim what is asked."""
        form = Flag.PACKED_ROWS if shape.kind is KVKind.MLA else Flag.PACKED_HEADS
        asked = {Flag.SOFTCAP: shape.softcap is not None, form: shape.packed}
        flags = frozenset(flag for flag, wanted in asked.items() if wanted)
        windows = frozenset({Mask.SLIDING_WINDOW}) if any(shape.windows) else frozenset()
        sizes = self.offer.capabilities.page_sizes
        page_size = page_size or (min(sizes) if sizes and 16 not in sizes else 16)
        needs = Needs(
            device=self.device.kind,
            compute_capability=self.device.compute_capability,
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
        pages = 256 if page_size * shape.head_dim <= 2**12 else 48
        return Bench(backend, shape, page_size, torch.device(self.device.kind), **{"pages": pages} | how)

    def play(
        self, bench: Bench, steps: Sequence[Mapping[str, int]], trees: Mapping[str, Tensor] | None = None
    ) -> list[Tensor]:
        """Run steps, compare each with the oracle, return their outputs."""
        outs = []
        for number, step in enumerate(steps):
            got, want = bench.step(step, trees if number == len(steps) - 1 else None)
            self.close(bench, got.double(), want)
            outs.append(got)
        return outs

    def close(self, bench: Bench, got: Tensor, want: Tensor) -> None:
        """Equal up to the rounding of the pool's dtype."""
        tolerance = TOLERANCE[bench.shape.dtype]
        torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)

    @proves("masks:causal")
    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_equals_the_oracle(self, scenario: str) -> None:
        """Every kind of batch, with the basic shape."""
        self.play(self.bench(self.shape()), SCENARIOS[scenario])

    @QUICK
    def test_shapes_equal_the_oracle(self, case: Case) -> None:
        """208 combinations of heads, head size, page size, dtype, feature and ragged batch, within what is claimed."""
        self.play(self.bench(case.shape, case.page_size, pages=16 + 600 // case.page_size), case.steps)

    @QUICK
    def test_every_batch_size(self, batch_size: int) -> None:
        """Decodes of 1, 2, 3, … requests, whose lengths all differ."""
        names = [f"r{i}" for i in range(batch_size)]
        lengths = {name: 1 + (7 * i) % 41 for i, name in enumerate(names)}
        self.play(self.bench(self.shape()), [lengths, dict.fromkeys(names, 1)])

    @QUICK
    @pytest.mark.parametrize("steps", SMALLEST, ids=str)
    def test_smallest_sequences(self, steps: list[dict[str, int]]) -> None:
        """A sequence of one token; a request without a token in this step; a step without any request."""
        self.play(self.bench(self.shape()), steps)

    @QUICK
    @proves("kv_kinds:gqa")
    @pytest.mark.parametrize("heads", HEADS, ids=str)
    def test_head_counts(self, heads: tuple[int, int]) -> None:
        """Every ratio of query to KV heads."""
        if self.shape().kind is not KVKind.GQA:
            pytest.skip(f"{self.offer.name}: KV kind gqa is not claimed")
        self.play(self.bench(self.shape(heads=heads[0], kv_heads=heads[1])), SCENARIOS["mixed"])

    @QUICK
    @proves("head_dims")
    def test_head_sizes(self, head_dim: int) -> None:
        """Every size that is claimed."""
        per_head = self.shape().kind is KVKind.GQA and head_dim <= WIDEST_HEAD
        shape = gqa(head_dim=head_dim) if per_head else mla(4, head_dim, head_dim - 64)
        self.play(self.bench(replace(shape, dtype=self.shape().dtype)), SCENARIOS["mixed"])

    @QUICK
    @proves("page_sizes")
    @pytest.mark.parametrize("scenario", ["mixed", "chunks with a prefix in pages"])
    def test_page_sizes(self, page_size: int, scenario: str) -> None:
        """Pages of one token, and pages longer than a sequence, as far as they are claimed."""
        self.play(self.bench(self.shape(), page_size), SCENARIOS[scenario])

    @QUICK
    @proves("dtypes")
    @pytest.mark.parametrize("scenario", ["mixed", "long prefill"])
    def test_dtypes(self, dtype: str, scenario: str) -> None:
        """Within the rounding of the dtype."""
        self.play(self.bench(self.shape(dtype=dtype)), SCENARIOS[scenario])

    @QUICK
    @proves("dtypes")
    def test_sums_are_not_kept_in_the_dtype(self, dtype: str) -> None:
        """The mean of 700 equal values is that value; a sum in 16 bits stops growing long before."""
        bench = self.bench(self.shape(dtype=dtype))
        bench.constant = True
        self.play(bench, [{"a": 700}, {"a": 1, "b": 3}])

    @QUICK
    def test_large_scores(self) -> None:
        """Scores above 100, whose exponentials float32 can't hold unless the largest score is taken off first."""
        basic = self.shape()
        bench = self.bench(self.shape(scale=48 * basic.head_dim**-0.5))
        tolerance = max(1e-4, TOLERANCE[basic.dtype])  # the error of a score grows with it
        for step in ({"a": 60, "b": 3}, {"a": 1, "b": 1}):
            got, want = bench.step(step)
            torch.testing.assert_close(got.double(), want, atol=tolerance, rtol=tolerance)

    @QUICK
    @proves("masks:sliding_window")
    @pytest.mark.parametrize("scenario", ["long prefill", "decodes", "mixed", "chunks with a prefix in pages"])
    def test_windows_differ_by_layer(self, scenario: str) -> None:
        """A window counts the query itself; each layer has its own."""
        self.play(self.bench(self.shape(windows=(None, 1, 7, 16, 300))), SCENARIOS[scenario])

    @QUICK
    @proves("flags:softcap")
    @pytest.mark.parametrize("scenario", ["mixed", "decodes"])
    def test_softcap(self, scenario: str) -> None:
        """Scores go through cap * tanh(score / cap)."""
        self.play(self.bench(self.shape(softcap=2.0, scale=1.0)), SCENARIOS[scenario])

    @QUICK
    @proves("kv_kinds:mla")
    @pytest.mark.parametrize("scenario", ["mixed", "chunks with a prefix in pages"])
    @pytest.mark.parametrize("sizes", [(576, 512), (96, 64)], ids=str)
    def test_mla(self, scenario: str, sizes: tuple[int, int]) -> None:
        """One latent row per token serves as key, and its first columns as value."""
        self.play(self.bench(mla(4, *sizes, dtype=self.shape().dtype)), SCENARIOS[scenario])

    @QUICK
    @proves("kv_kinds:mla")
    @pytest.mark.parametrize("scenario", EXPANDED)
    def test_rows_that_may_be_expanded(self, scenario: str) -> None:
        """From plain queries: chunks worth expanding, among decodes and short chunks, and behind a prefix."""
        self.play(self.bench(latent(dtype=self.shape().dtype)), EXPANDED[scenario])

    @QUICK
    @proves("kv_kinds:mla")
    def test_expanded_chunks_equal_the_whole(self) -> None:
        """Wherever a prompt is cut, and whichever form its chunks take."""
        (whole,) = self.play(self.bench(latent(dtype=self.shape().dtype)), [{"a": 250}])
        parts = self.play(self.bench(latent(dtype=self.shape().dtype)), [{"a": n} for n in (100, 1, 9, 140)])
        self.close(self.bench(latent(dtype=self.shape().dtype)), torch.cat(parts, dim=1), whole)

    @QUICK
    @proves("flags:packed_rows")
    @pytest.mark.parametrize("scenario", EXPANDED)
    def test_rows_in_8_bits(self, scenario: str) -> None:
        """Against the rows that the cache stands for, absorbed and expanded."""
        dtype = self.shape().dtype
        self.play(self.bench(latent(dtype=dtype, packed=True, expanded=None)), EXPANDED[scenario])
        self.play(self.bench(latent(dtype=dtype, packed=True)), EXPANDED[scenario])

    @QUICK
    @proves("flags:packed_heads")
    @pytest.mark.parametrize("scenario", ["long prefill", "decodes", "mixed", "chunks with a prefix in pages"])
    def test_heads_in_8_bits(self, scenario: str) -> None:
        """Against the keys and values that the cache stands for."""
        self.play(self.bench(self.shape(packed=True)), SCENARIOS[scenario])

    @QUICK
    @proves("flags:graph_safe")
    def test_padding_is_no_request(self) -> None:
        """Rows behind the decodes of a captured step, of length 0 and slot -1, are neither stored nor attended."""
        if Flag.GRAPH_SAFE not in self.offer.capabilities.flags:
            pytest.skip(f"{self.offer.name} does not claim to be safe for graphs")
        bench = self.bench(self.shape())
        self.play(bench, [{"a": 20, "b": 70}])
        for padding in (1, 5, 0):
            got, want = bench.step({"a": 1, "b": 1}, padding=padding)
            self.close(bench, got.double(), want)

    @QUICK
    @proves("masks:tree")
    @pytest.mark.parametrize("windows", [(None,), (2, None)], ids=str)
    def test_tree(self, windows: tuple[int | None, ...]) -> None:
        """New tokens see the past and, among themselves, what the tree says; siblings share a position."""
        bench = self.bench(self.shape(windows=windows), masks=frozenset({Mask.TREE}))
        parents = {"b": [None, 0, 0, 1, 2, 4], "d": [None, None, 1]}
        trees = {name: _tree(tree) for name, tree in parents.items()}
        self.play(bench, [{"a": 9, "b": 20, "c": 4}, {"a": 1, "b": 6, "c": 5, "d": 3}], trees)

    @QUICK
    @proves("masks:tree")
    def test_tree_that_is_a_chain_equals_causal(self) -> None:
        """A chain drawn as a tree is the plain mask."""
        steps = [{"a": 30, "b": 2}, {"a": 5, "b": 1}]
        bench = self.bench(self.shape(), masks=frozenset({Mask.TREE}))
        drawn = self.play(bench, steps, {"a": _tree([None, 0, 1, 2, 3])})
        plain = self.play(self.bench(self.shape()), steps)
        self.close(bench, drawn[-1], plain[-1])

    @QUICK
    @pytest.mark.parametrize("scenario", ["mixed", "many decodes"])
    def test_where_pages_lie_changes_nothing(self, scenario: str) -> None:
        """Two block tables over the same tokens."""
        one = self.play(self.bench(self.shape(), placement=1), SCENARIOS[scenario])
        bench = self.bench(self.shape(), placement=2)
        for a, b in zip(one, self.play(bench, SCENARIOS[scenario]), strict=True):
            self.close(bench, a, b)

    @QUICK
    @proves("layouts")
    def test_the_layout_is_a_claimed_one(self) -> None:
        """Named parts tell how a page is kept: `k` and `v`, `latent`, or a format of the backend's own."""
        claimed = self.offer.capabilities.layouts
        if not claimed:
            pytest.skip(f"{self.offer.name} claims no layout")
        shapes = [self.shape()]
        if KVKind.MLA in self.offer.capabilities.kv_kinds and shapes[0].kind is KVKind.GQA:
            shapes.append(mla(4, 576, 512, dtype=shapes[0].dtype))
        if Flag.PACKED_HEADS in self.offer.capabilities.flags:
            shapes.append(self.shape(packed=True))
        if Flag.PACKED_ROWS in self.offer.capabilities.flags:
            shapes.append(latent(dtype=shapes[0].dtype, packed=True))
        found = {layout_of(self.bench(shape).backend) for shape in shapes}
        assert found == claimed

    @QUICK
    def test_chunked_equals_whole(self) -> None:
        """A prompt cut anywhere gives the rows of the prompt in one piece."""
        bench = self.bench(self.shape())
        (whole,) = self.play(bench, [{"a": 75}])
        parts = self.play(self.bench(self.shape()), [{"a": n} for n in (1, 15, 1, 31, 27)])
        self.close(bench, torch.cat(parts, dim=1), whole)

    @QUICK
    @proves("masks:tree_levels")
    def test_tree_level_by_level(self) -> None:
        """Nodes of two trees come in three steps, beside a decode: each sees the past, its ancestors and itself."""
        bench = self.bench(self.shape(), masks=frozenset({Mask.TREE_LEVELS}))
        bench.step({"a": 17, "b": 300, "c": 9})
        a, b = _tree([None, None, None, 0, 0, 2, 3, 5, 5]), _tree([None, None, 0, 0, 1, 1, 4, 3, 2])
        for first, last in ((0, 3), (3, 6), (6, 9)):
            trees = {"a": a[first:last, :last]}
            if last != 3:  # b's first two levels come at once
                start = 0 if last == 6 else 6
                trees["b"] = b[start:last, :last]
            self.play(bench, [{name: len(tree) for name, tree in trees.items()} | {"c": 1}], trees)

    @QUICK
    def test_neighbours_change_nothing(self) -> None:
        """A request alone and among others, whose values are huge."""
        (alone,) = self.play(self.bench(self.shape()), [{"a": 40}])
        bench = self.bench(self.shape())
        bench.magnitude = {"b": 1e3, "c": 1e3}
        among, _ = bench.step({"b": 33, "a": 40, "c": 7})
        self.close(bench, among[:, 33:73], alone)

    @QUICK
    def test_nothing_is_written_but_at_the_slots(self) -> None:
        """Pages of others, and the rest of the own ones, keep every bit."""
        bench = self.bench(self.shape())
        for step in SCENARIOS["mixed"]:
            bench.step(step)

    @QUICK
    def test_a_plan_belongs_to_its_step(self) -> None:
        """Steps of the same sizes follow each other with other pages and lengths; nothing is kept of the one before."""
        bench = self.bench(self.shape())
        self.play(bench, [{"a": 20, "b": 20}, {"a": 1, "b": 1}])
        for name in ("a", "b"):
            bench.drop(name)
        self.play(bench, [{"b": 20, "a": 20}, {"a": 1, "b": 1}, {"b": 1, "a": 1}])

    @pytest.mark.parametrize("seed", range(6))
    def test_random_traffic(self, seed: int) -> None:
        """Requests come, grow in chunks, decode and leave; pages are used again with what they held before."""
        rng = torch.Generator().manual_seed(seed)
        bench = self.bench(self.shape())
        for number in range(12):
            new = {f"r{i}": _draw(rng, [1, 1, 1, 2, 16, 40]) for i in range(6) if _draw(rng, [0, 1, 1])}
            self.play(bench, [new or {"r0": 1}])
            if number % 3 == 2:
                bench.drop(f"r{_draw(rng, range(6))}")


def layout_of(backend: AttentionBackend) -> Layout:
    """How the parts of a page are called says how it is kept."""
    names = tuple(name for name, _ in backend.kv_layout().parts)
    return {("k", "v"): Layout.SPLIT, ("latent",): Layout.LATENT}.get(names, Layout.PACKED)


def _draw(rng: torch.Generator, choices: Any) -> int:
    return int(choices[int(torch.randint(len(choices), (), generator=rng))])


def _tree(parents: list[int | None]) -> Tensor:
    """bool [n, n]: each token sees itself and its ancestors."""
    sees = torch.eye(len(parents), dtype=torch.bool)
    for child, parent in enumerate(parents):
        if parent is not None:
            sees[child] |= sees[parent]
    return sees


__all__ = ["AttentionConformance", "gqa", "latent", "mla"]
