"""Made-up weights: deterministic, of the expected shapes, and never taken for real ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.plugins.weight_loaders import dummy as plugin
from engine.plugins.weight_loaders import safetensors
from engine.plugins.weight_loaders.dummy.loader import DummyLoader
from engine.specs.weight_loader import WeightSource
from engine.testing.weight_loader import WeightLoaderConformance

SHAPES = {"a.weight": (50, 40), "b.weight": (50, 40), "norm.weight": (40,), "a.bias": (50,)}


class TestDummy(WeightLoaderConformance):
    (offer,) = plugin.weight_loaders()
    module = "engine.plugins.weight_loaders.dummy"


@pytest.fixture
def source(tmp_path: Path) -> WeightSource:
    (tmp_path / "config.json").write_text('{"hidden_size": 40}')
    opened = DummyLoader().open(tmp_path, DummyLoader().config(tmp_path))
    opened.expect(SHAPES)
    return opened


def test_shapes_are_those_the_model_expects(source: WeightSource) -> None:
    assert set(source.names()) == set(SHAPES)
    for name, shape in SHAPES.items():
        assert source.shape(name) == shape == tuple(source.get(name, torch.float32).shape)
    with pytest.raises(KeyError, match=r"did not say that it needs tensor c\.weight"):
        source.get("c.weight", torch.float32)


def test_values_are_deterministic_and_differ_by_name(source: WeightSource, tmp_path: Path) -> None:
    first = source.get("a.weight", torch.float32)
    again = DummyLoader().open(tmp_path, DummyLoader().config(tmp_path))
    again.expect(SHAPES)
    assert torch.equal(again.get("a.weight", torch.float32), first)
    assert not torch.equal(source.get("b.weight", torch.float32), first)
    assert torch.equal(source.get("a.weight", torch.float32, slice(3, 9)), first[3:9])
    assert source.get("a.weight", torch.bfloat16).dtype is torch.bfloat16
    assert 0.015 < first.std() < 0.025


def test_norms_are_one_and_biases_are_not(source: WeightSource) -> None:
    assert torch.equal(source.get("norm.weight", torch.float32), torch.ones(40))
    assert 0 < source.get("a.bias", torch.float32).abs().max() < 0.2


def test_real_weights_go_first() -> None:
    (real,) = safetensors.weight_loaders()
    assert real.rank > TestDummy.offer.rank


def test_digest_follows_the_config(source: WeightSource, tmp_path: Path) -> None:
    other = DummyLoader().open(tmp_path, {"hidden_size": 41})
    assert source.digest() != other.digest()
