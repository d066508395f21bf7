"""Latent rows by Triton's interpreter, where there is no GPU; on one, the whole suite covers them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.capabilities import Mask
from engine.device import detect
from engine.latent.rounds import Piece
from engine.latent.triton_dense import TritonDense
from engine.plugins.attention import triton as plugin
from engine.plugins.attention.triton.mla import TritonLatent
from engine.specs.attention import AttentionShape
from engine.testing.attention import AttentionConformance, latent, mla

DECLARED = plugin.attention_backends()[0]
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the whole suite runs on this GPU")


class Interpreted(AttentionConformance):
    offer = replace(DECLARED, capabilities=replace(DECLARED.capabilities, devices=frozenset({"cpu"})))
    device = detect("cpu")


SUITE = Interpreted()

CASES = {  # shape, page size, tokens of the first prompt
    "small pages": (mla(2, 96, 64), 4, 20),
    "more heads than a tile": (mla(20, 80, 64, dtype="float16"), 64, 9),
    "8 bits": (latent(2, packed=True, expanded=None), 16, 20),
    "8 bits of 16": (latent(2, packed=True, expanded=None, dtype="float16"), 64, 66),
}


@pytest.mark.parametrize(("shape", "page_size", "prompt"), CASES.values(), ids=CASES)
def test_decodes_and_short_chunks(shape: AttentionShape, page_size: int, prompt: int) -> None:
    """Runs end within requests; the last step has a decode, a chunk behind a prefix, and a fresh prompt."""
    SUITE.play(SUITE.bench(shape, page_size), [{"a": prompt, "b": 7}, {"a": 1, "b": 3, "c": 2}])


@pytest.mark.parametrize("packed", [False, True])
def test_chunks_worth_expanding(packed: bool) -> None:
    bench = SUITE.bench(latent(2, packed=packed))
    bench.backend._most = 70
    SUITE.play(bench, [{"a": 80}, {"a": 1, "b": 100, "c": 2}])


def test_tree() -> None:
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    bench = SUITE.bench(mla(2, 96, 64), masks=frozenset({Mask.TREE}))
    SUITE.play(bench, [{"a": 9, "b": 20}, {"a": 1, "b": 4, "c": 5}], {"b": sees})


def test_the_last_tiles_of_a_prompt_come_first() -> None:
    tiles = TritonDense(torch.bfloat16).plan([Piece(3, 200, 50, 0, 250, 0)], torch.device("cpu"))
    assert tiles.tolist() == [[131, 72, 178, 0, 250, 0], [3, 128, 50, 0, 250, 0]]


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (mla(2, 72, 48), "powers of two, not 48"),
        (mla(2, 96, 64, windows=(8,)), "no sliding window and no soft cap over latent rows"),
        (mla(2, 96, 64, softcap=2.0), "no sliding window and no soft cap over latent rows"),
    ],
)
def test_what_the_kernels_lack_is_refused_at_build(shape: AttentionShape, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TritonLatent(shape, 16, detect("cpu"))
