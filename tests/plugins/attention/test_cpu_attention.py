"""The compiled backend through the suite, and what it promises beyond the contract."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine.device import detect
from engine.ops.kernels import missing
from engine.plugins.attention import cpu
from engine.plugins.attention.cpu.schedule import Schedule, schedule
from engine.specs.attention import AttentionShape
from engine.testing.attention import AttentionConformance, gqa, mla
from engine.testing.attention_bench import Bench
from engine.testing.offer import CPU

DEVICE = detect("cpu")
pytestmark = pytest.mark.skipif(missing(DEVICE) is not None, reason=str(missing(DEVICE)))


class TestCpuAttention(AttentionConformance):
    (offer,) = cpu.attention_backends()
    module = "engine.plugins.attention.cpu"
    device = DEVICE

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_values_narrower_than_keys(self, dtype: str) -> None:
        self.play(self.bench(gqa(6, 2, 96, v_head_dim=48, dtype=dtype)), [{"a": 20}, {"a": 1, "b": 9}])

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_more_heads_than_a_tile_has_rows(self, dtype: str) -> None:
        self.play(self.bench(gqa(64, 1, 16, dtype=dtype)), [{"a": 20, "b": 3}, {"a": 1, "b": 2}])

    def test_tree_longer_than_a_tile_whose_queries_look_ahead(self) -> None:
        """A tree may name any of the new tokens, also across the border of a segment."""
        sees = torch.eye(40, dtype=torch.bool) | torch.eye(40, dtype=torch.bool).flip(1)
        self.play(self.bench(gqa(windows=(None, 90))), [{"a": 490}, {"a": 40}], {"a": sees})

    @pytest.mark.parametrize("shape", [gqa(9, 3), gqa(9, 3, dtype="bfloat16"), gqa(windows=(200,))], ids=str)
    def test_result_depends_on_nothing_else_to_the_bit(self, shape: AttentionShape) -> None:
        """In one piece; cut into chunks; token by token, with its keys split over threads; among others."""
        (whole,) = self.play(self.bench(shape), [{"a": 1100}])
        assert torch.equal(torch.cat(self.play(self.bench(shape), [{"a": n} for n in (513, 7, 579, 1)]), 1), whole)
        bench = self.bench(shape)
        self.play(bench, [{"a": 1099, "b": 50, "c": 700}])
        got, _ = bench.step({f"r{i}": 1 for i in range(20)} | {"a": 1, "b": 30})
        assert torch.equal(got[:, 20], whole[:, -1])

    def test_any_number_of_threads_gives_the_same_bits(self) -> None:
        outs = []
        for threads in (1, 2, 5):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            try:
                outs.append(self.play(self.bench(gqa(9, 3)), [{"a": 1030}, {"a": 1}, {"a": 1, "b": 300}]))
            finally:
                torch.set_num_threads(before)
        for other in outs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(outs[0], other, strict=True))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_strided_queries_and_keys(self, dtype: str) -> None:
        """Views into a merged projection give what dense tensors give."""
        bench = self.bench(gqa(9, 3, dtype=dtype))
        bench.step({"a": 5})
        batch = self._next(bench)
        merged = torch.randn(1, 15, 64, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
        q, k, v = merged.split((9, 3, 3), dim=1)
        kv = bench.layers[0]
        views = bench.backend.forward(0, q, k, v, kv, batch)
        dense = bench.backend.forward(0, q.contiguous(), k.contiguous(), v.contiguous(), kv, batch)
        assert torch.equal(views, dense)

    def test_nan_in_one_request_stays_there(self) -> None:
        bench = self.bench(gqa())
        bench.magnitude = {"b": float("nan")}
        got, want = bench.step({"a": 40, "b": 33, "c": 7})
        assert got[:, 40:73].isnan().all()
        torch.testing.assert_close(got[:, :40].double(), want[:, :40], atol=2e-5, rtol=2e-5)
        torch.testing.assert_close(got[:, 73:].double(), want[:, 73:], atol=2e-5, rtol=2e-5)

    def _next(self, bench: Bench) -> object:
        """The plan of one more token of request a."""
        bench._grow("a", 1, None)
        return bench.backend.plan(bench._batch(["a"], {"a": 1}, {}))

    def test_what_it_cannot_do_is_refused_at_build(self) -> None:
        def build(shape: AttentionShape, page_size: int = 16) -> None:
            self.offer.build(self.options(), shape=shape, page_size=page_size, device=DEVICE)

        with pytest.raises(ValueError, match="multiples of 16, which excludes head_dim 24, v_head_dim 24, page_size 8"):
            build(gqa(head_dim=24), 8)
        with pytest.raises(ValueError, match="keeps K and V per KV head, not mla"):
            build(mla())
        with pytest.raises(ValueError, match="5 query heads can't be shared out among 2 KV heads"):
            build(gqa(5, 2))

    def test_layout_tells_the_order_inside_a_page(self) -> None:
        """A peer with another order must not take these pages for its own."""
        assert self.bench(gqa(4, 2, 64), 32).backend.kv_layout().parts == (
            ("k", (2, 2, 64, 16)),
            ("v", (2, 32, 64)),
        )
        assert self.bench(gqa(4, 2, 64, dtype="bfloat16"), 32).backend.kv_layout().parts == (
            ("k", (2, 2, 32, 16, 2)),
            ("v", (2, 16, 64, 2)),
        )

    def test_device_without_the_instructions_is_refused(self) -> None:
        assert "lacks avx512_bf16" in str(self.offer.available(CPU))


class TestSchedule:
    """How work is cut, apart from any kernel."""

    @staticmethod
    def cut(queries: list[int], ends: list[int], trees: tuple[int, ...] = (), threads: int = 2) -> Schedule:
        return schedule(
            np.array(queries, np.int32),
            np.array(ends, np.int32),
            trees,
            tile=16,
            segment=512,
            kv_heads=3,
            threads=threads,
        )

    def test_decodes_store_their_own_keys(self) -> None:
        cut = self.cut([1] * 8, list(range(100, 900, 100)))
        assert len(cut.stores) == len(cut.merges) == cut.partials == 0
        assert sorted(cut.items[:, 0]) == list(range(8))
        assert cut.items[0].tolist() == [7, 0, 1, 0, 2, -1, 1]

    def test_prefill_is_tiled_longest_first_and_stored_beforehand(self) -> None:
        cut = self.cut([1, 100], [5, 120])
        assert cut.stores.tolist() == list(range(1, 101))
        ours = cut.items[cut.items[:, 0] == 1]
        assert sorted(ours[:, 1].tolist()) == list(range(0, 100, 16))
        assert ours[:, 2].sum() == 100
        cost = cut.items[:, 2] * (cut.items[:, 1] + cut.items[:, 2] + np.where(cut.items[:, 0] == 1, 20, 4))
        assert (np.diff(cost) <= 0).all()

    def test_lonely_long_request_is_split_along_its_keys(self) -> None:
        cut = self.cut([1], [1300])
        assert cut.items[:, 3:6].tolist() == [[0, 1, 0], [1, 1, 1], [2, 1, 2]]
        assert cut.merges.tolist() == [[0, 0, 1, 0, 3]]
        assert cut.stores.tolist() == [0]
        assert cut.partials == 3

    def test_many_long_requests_are_not_split(self) -> None:
        assert self.cut([1] * 6, [1300] * 6).partials == 0
        assert self.cut([1] * 6, [1300] * 6, threads=3).partials == 18

    def test_queries_of_a_tree_reach_its_end(self) -> None:
        """Tile 0 of 40 queries after 490 keys ends before the segment does, its tree does not."""
        assert self.cut([40] + [1] * 9, [530] + [9] * 9).items[:, 4].max() == 2
        segments = {tuple(row[:2]): row[4] for row in self.cut([40] + [1] * 9, [530] + [9] * 9, (0,)).items.tolist()}
        assert segments[0, 0] == 2
