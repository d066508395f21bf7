"""Keys and values in 8 bits: what is kept, and that every path reads it alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from engine.device import detect
from engine.eight_bits import rounded
from engine.plugins.attention import triton as plugin
from engine.testing.attention import AttentionConformance, gqa

GPU = torch.cuda.is_available()
(DECLARED,) = plugin.attention_backends()


class Here(AttentionConformance):
    offer = (
        DECLARED if GPU else replace(DECLARED, capabilities=replace(DECLARED.capabilities, devices=frozenset({"cpu"})))
    )
    device = detect("cuda" if GPU else "cpu")


def test_rounding_again_changes_nothing() -> None:
    rows = torch.randn(50, 32, generator=torch.Generator().manual_seed(1)) * torch.logspace(-9, 9, 50)[:, None]
    once = rounded(rows)
    assert torch.equal(rounded(once), once)
    most = rows.abs().amax(1, keepdim=True)
    assert bool(((once - rows).abs() <= torch.maximum(rows.abs() * 2**-4, most * 2**-17)).all())
    assert torch.equal(rounded(once.bfloat16()).float(), once), "exact in 16 bits"
    assert not rounded(torch.zeros(2, 8)).any()


@pytest.mark.parametrize("head_dims", [(32, 32), (32, 16)], ids=str)
def test_prefills_chunks_and_decodes(head_dims: tuple[int, int]) -> None:
    """A decode whose keys are split, a chunk behind a prefix, a fresh prompt; then everything decodes."""
    shape = gqa(4, 2, head_dims[0], v_head_dim=head_dims[1], packed=True)
    suite = Here()
    bench = suite.bench(shape)
    suite.play(bench, [{"a": 40, "b": 20}, {"a": 1, "b": 3, "c": 17}, {"a": 1, "b": 1, "c": 1}])
    kept = {name for name, _ in bench.backend.kv_layout().parts}
    assert kept == {"k_packed", "v_packed", "k_scale", "v_scale"}
