"""The Hopper backend's host side, with the kernel replaced by what it computes: rows, lengths, stores, chunks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from engine.device import detect
from engine.latent.rows import rows_of
from engine.plugins.attention.flashmla.backend import FlashMLA
from engine.plugins.attention.flashmla.launch import Decode, Line
from engine.specs.attention import AttentionShape
from engine.testing.attention import mla
from engine.testing.attention_bench import Bench

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel itself is tested on a GPU")

STEPS = [{"a": 5, "b": 63}, {"a": 1, "b": 1}, {"a": 1, "b": 3, "c": 2}, {}]


def replaced(monkeypatch: pytest.MonkeyPatch, shape: AttentionShape) -> None:
    """Each row of the line attends to the first `seq_lens` rows of its pages."""
    form = rows_of(shape)

    def attend(self: Decode, q: Tensor, latent: Tensor, work: Line) -> Tensor:
        out = torch.empty(*q.shape[:2], 512, dtype=q.dtype)
        for row, (length, table) in enumerate(zip(work.seq_lens.tolist(), work.block_tables, strict=True)):
            pages = table[: -(-length // 64)].long()
            keys = form.load(latent, (pages,)).flatten(0, 2)[:length].double()
            weights = torch.softmax(q[row].double() @ keys.T * shape.scale, -1)
            out[row] = (weights @ keys[:, :512]).to(q.dtype)
        return out

    monkeypatch.setattr(Decode, "__call__", attend)


@interpreted
def test_decodes_and_short_chunks_are_rows_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = mla(3, dtype="bfloat16")
    replaced(monkeypatch, shape)
    bench = Bench(FlashMLA(shape, 64, detect("cpu")), shape, 64, torch.device("cpu"), pages=12)
    for step in STEPS:
        got, wanted = bench.step(step, None)
        torch.testing.assert_close(got.double(), wanted, atol=3e-2, rtol=3e-2)


def test_draft_trees_are_refused() -> None:
    backend = FlashMLA(mla(3, dtype="bfloat16"), 64, detect("cpu"))
    bench = Bench(backend, backend.shape, 64, torch.device("cpu"), pages=12)
    with pytest.raises(ValueError, match="no tree masks"):
        bench.step({"a": 3}, {"a": torch.ones(3, 3, dtype=torch.bool).tril()})
