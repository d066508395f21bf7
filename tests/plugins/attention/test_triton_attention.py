"""The Triton backend: the whole suite on a GPU, and where there is none a part of it in Triton's interpreter, in which
every program is a slow walk through numpy. The interpreter misreads bfloat16 in dot(), so float16 stands for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.capabilities import Mask
from engine.device import detect
from engine.plugins.attention import triton as plugin
from engine.specs.attention import AttentionShape
from engine.testing.attention import AttentionConformance, gqa

GPU = torch.cuda.is_available()
DECLARED = plugin.attention_backends()[0]


@pytest.mark.skipif(not GPU, reason="the whole suite takes minutes in Triton's interpreter")
class TestTritonAttention(AttentionConformance):
    offer = DECLARED
    module = "engine.plugins.attention.triton"
    device = detect("cuda" if GPU else "cpu")


class Interpreted(AttentionConformance):
    offer = replace(DECLARED, capabilities=replace(DECLARED.capabilities, devices=frozenset({"cpu"})))
    device = detect("cpu")


interpreted = pytest.mark.skipif(GPU, reason="the whole suite runs on this GPU")
SUITE = Interpreted()

SHAPES = {
    "plain": gqa(4, 2, 32),
    "half": gqa(4, 2, 32, dtype="float16"),
    "three heads share one": gqa(3, 1, 16),
    "window": gqa(2, 1, 32, windows=(None, 7)),
    "softcap": gqa(2, 1, 32, softcap=2.0, scale=1.0),
    "values narrower than keys": gqa(2, 2, 32, v_head_dim=16),
}


@interpreted
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_prefills_chunks_and_decodes(shape: AttentionShape) -> None:
    """The last step has a decode whose keys are split, a short chunk behind a prefix, and a fresh prompt."""
    steps = [{"a": 150, "b": 20}, {"a": 1, "b": 1}, {"a": 1, "b": 3, "c": 33}]
    SUITE.play(SUITE.bench(shape), steps)


@interpreted
def test_long_prefill_in_tiles_of_one_head() -> None:
    SUITE.play(SUITE.bench(gqa(2, 1, 16)), [{"a": 90}, {"a": 70}])


@interpreted
def test_tree() -> None:
    sees = torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]).bool()
    bench = SUITE.bench(gqa(2, 1, 16, windows=(None, 2)), masks=frozenset({Mask.TREE}))
    SUITE.play(bench, [{"a": 9, "b": 20}, {"a": 1, "b": 4, "c": 5}], {"b": sees})


def test_tokens_of_one_request_as_decodes() -> None:
    """A chunk whose tokens are decodes of their own gives the rows of the chunk, and the same pages."""
    suite = TestTritonAttention() if GPU else SUITE
    shape = gqa(4, 2, 32)
    whole, spread = suite.bench(shape), suite.bench(shape)
    for bench in (whole, spread):
        suite.play(bench, [{"a": 21}])
        bench._grow("a", 5, None)
    outs = []
    for bench, cut in ((whole, False), (spread, True)):
        batch = bench._batch(["a"], {"a": 5}, {})
        if cut:
            ones = torch.arange(6, dtype=torch.int32, device=bench.device)
            lengths = (batch.positions + 1).int()
            batch = replace(
                batch,
                query_start=ones,
                seq_lens=lengths,
                block_tables=batch.block_tables.expand(5, -1).contiguous(),
                num_decodes=5,
                query_lens_host=ones[1:].cpu().numpy() * 0 + 1,
                seq_lens_host=lengths.cpu().numpy(),
                requests_repeat=True,
            )
        q, k, v = bench._inputs(["a"], {"a": 5})
        outs.append(bench.backend.forward(0, q, k, v, bench.layers[0], bench.backend.plan(batch)))
    torch.testing.assert_close(outs[0], outs[1], atol=2e-5, rtol=2e-5)
    for one, other in zip(whole.layers[0], spread.layers[0], strict=True):
        torch.testing.assert_close(one, other, equal_nan=True, atol=0, rtol=0)
