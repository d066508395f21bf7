"""Dense layers: merged rows, biases, the tied head."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from engine.capabilities import Flag
from engine.plugins.quantization import none as plugin
from engine.plugins.weight_loaders.safetensors.weights import SafetensorsWeights
from engine.specs.quantization import Quantization
from engine.testing.offer import CPU
from engine.testing.quantization import QuantizationConformance

TENSORS = {
    "q.weight": torch.arange(24.0).view(6, 4) / 10,
    "k.weight": -torch.arange(8.0).view(2, 4),
    "q.bias": torch.arange(6.0),
    "k.bias": torch.tensor([100.0, 200.0]),
}


class TestNone(QuantizationConformance):
    (offer,) = plugin.quantizations()
    module = "engine.plugins.quantization.none"


@pytest.fixture
def source(tmp_path: Path) -> SafetensorsWeights:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return SafetensorsWeights([tmp_path / "model.safetensors"])


def dense(dtype: torch.dtype = torch.float32) -> Quantization:
    offer = TestNone.offer
    return offer.build(offer.options(), device=CPU, dtype=dtype)


def test_rows_stand_in_the_order_of_the_names(source: SafetensorsWeights) -> None:
    layer = dense().linear(source, ["k.weight", "q.weight"], ["k.bias", "q.bias"])
    x = torch.randn(3, 4)
    expected = torch.cat([x @ TENSORS[f"{name}.weight"].T + TENSORS[f"{name}.bias"] for name in "kq"], dim=1)
    torch.testing.assert_close(layer(x), expected)
    assert (layer.out_features, layer.in_features) == (8, 4)
    assert layer.weight_bytes() == 4 * (8 * 4 + 8)


def test_weights_are_kept_in_the_dtype_asked_for(source: SafetensorsWeights) -> None:
    layer = dense(torch.bfloat16).linear(source, ["q.weight"])
    assert layer.dense().dtype is torch.bfloat16
    assert layer(torch.ones(2, 4, dtype=torch.bfloat16)).dtype is torch.bfloat16
    assert layer.weight_bytes() == 2 * 24


def test_head_shares_the_embedding() -> None:
    embedding = torch.randn(10, 4)
    head = dense().head(embedding)
    assert head.dense() is embedding
    torch.testing.assert_close(head(torch.eye(4)), embedding.T)


def test_it_is_lossless() -> None:
    assert Flag.LOSSLESS in TestNone.offer.capabilities.flags
