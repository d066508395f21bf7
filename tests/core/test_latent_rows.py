"""Latent rows: what 8 bits keep of them, which requests are expanded, and in how little memory."""

from __future__ import annotations

import pytest
import torch

from engine.latent.rounds import expansion_pays, rows_at_once
from engine.latent.rows import PackedRows, power_above
from engine.latent.up import LatentUp
from engine.latent.widths import packed_bytes
from engine.plugins.attention.reference.latent import ReferenceLatent
from engine.testing.attention import latent, mla
from engine.testing.attention_bench import Bench

DEEPSEEK = mla(128, expanded=(192, 128), dtype="bfloat16")


def test_scales_are_the_least_powers_of_two_that_suffice() -> None:
    values = torch.tensor([1.0, 1.0001, 0.75, 2.0**-13, 3e-4, 448.0])
    assert power_above(values).tolist() == [1.0, 2.0, 1.0, 2.0**-13, 2.0**-11, 512.0]


def test_the_row_of_deepseek_takes_656_bytes() -> None:
    assert packed_bytes(576, 512, 2) == 656
    assert PackedRows(DEEPSEEK).layout(64).parts == (("packed", (64, 1, 656)),)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("width", [24, 64, 512, 200])
def test_8_bits_keep_a_sixteenth_of_each_block(dtype: str, width: int) -> None:
    """An element moves by at most half a step of e4m3: 1/16 of itself, or 2^-10 of its block's scale near zero."""
    rows = PackedRows(mla(2, width + 16, width, dtype=dtype))
    given = (torch.randn(40, 1, width + 16) * torch.logspace(-3, 1, 40)[:, None, None]).to(getattr(torch, dtype))
    packed = rows.pack(given)
    assert packed.shape == (40, 1, packed_bytes(width + 16, width, given.element_size()))
    back = rows.unpack(packed)
    assert torch.equal(back[..., width:], given[..., width:]), "the rotary part is kept as it is"
    error = (back.float() - given.float()).abs()[..., :width]
    largest = given[..., :width].abs().amax(-1, keepdim=True).float().clamp_min(0.0448)
    assert (error <= torch.maximum(given[..., :width].float().abs() / 16, largest * 2 / 448 * 2**-10)).all()
    assert torch.equal(rows.unpack(rows.pack(back)), back), "what was rounded once is kept exactly"


def test_a_latent_that_leaves_scales_askew_is_refused() -> None:
    with pytest.raises(ValueError, match="a multiple of 4, not 30"):
        packed_bytes(38, 30, 2)


def test_rows_are_expanded_where_that_takes_fewer_operations() -> None:
    assert [expansion_pays(DEEPSEEK, n, 10**6 + n) for n in (1, 170, 171)] == [False, False, True]
    assert [expansion_pays(DEEPSEEK, n, n) for n in (340, 341)] == [False, True]
    assert not expansion_pays(mla(128), 10**4, 10**4), "nobody says how wide they would be"


def test_the_projection_gives_the_same_on_either_side() -> None:
    up = LatentUp.of(torch.randn(3, 10 + 6, 8), 10)
    queries, rows = torch.randn(5, 3, 10 + 4), torch.randn(7, 8 + 4)
    keys, rotary, values = up.expand(rows)
    expanded = torch.einsum("thd,nhd->thn", queries[..., :10], keys) + torch.einsum(
        "thd,nd->thn", queries[..., 10:], rotary
    )
    torch.testing.assert_close(torch.einsum("thd,nd->thn", up.absorb(queries), rows), expanded)
    weights = torch.rand(5, 3, 7)
    mixed = up.mixed(torch.einsum("thn,nl->thl", weights, rows[:, :8]))
    torch.testing.assert_close(mixed, torch.einsum("thn,nhv->thv", weights, values))


class Watched(LatentUp):
    """Keeps how many rows were expanded at a time."""

    seen: list[int] = []

    def expand(self, rows: torch.Tensor):
        self.seen.append(len(rows))
        return super().expand(rows)


@pytest.mark.parametrize("most", [7, 64, 1000])
def test_rounds_hold_no_more_rows_than_fit_and_change_nothing(most: int) -> None:
    shape = latent()
    backend = ReferenceLatent(shape, 8)
    backend._most = most
    bench = Bench(backend, shape, 8, torch.device("cpu"))
    bench.up = Watched(bench.up.weight, bench.up.key, bench.up.value)
    Watched.seen = []
    for step in ({"a": 90, "b": 20}, {"a": 100, "c": 1, "b": 5, "d": 130}):
        got, want = bench.step(step)
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert sum(Watched.seen) == 90 + 190 + 130
    assert max(Watched.seen) <= most


def test_decodes_and_short_chunks_expand_nothing() -> None:
    shape = latent()
    bench = Bench(ReferenceLatent(shape, 8), shape, 8, torch.device("cpu"))
    bench.step({"a": 90, "b": 20})
    Watched.seen = []
    bench.up = Watched(bench.up.weight, bench.up.key, bench.up.value)
    for step in ({"a": 1, "b": 1}, {"a": 5, "b": 9}):
        got, want = bench.step(step)
        torch.testing.assert_close(got.double(), want, atol=2e-5, rtol=2e-5)
    assert Watched.seen == []


def test_the_workspace_of_a_round_is_bounded() -> None:
    rows = rows_at_once(DEEPSEEK, 2)
    assert rows * 128 * (192 + 128) * 2 <= 128 * 2**20 < (rows + 1) * 128 * (192 + 128) * 2
