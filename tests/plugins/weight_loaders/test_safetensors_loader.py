"""Safetensors folders: sharded or not, incomplete, damaged, and pickled ones that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.plugins.models.llama.shape import read_shape, tensors
from engine.plugins.weight_loaders import safetensors as plugin
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.specs.weight_loader import WeightSource
from engine.testing.weight_loader import WeightLoaderConformance

INDEX = "model.safetensors.index.json"


class TestSafetensors(WeightLoaderConformance):
    (offer,) = plugin.weight_loaders()
    module = "engine.plugins.weight_loaders.safetensors"


def weights() -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(3)
    return {f"layers.{i}.weight": torch.randn(6, 4, generator=random) for i in range(4)}


@pytest.fixture
def single(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"hidden_size": 4}')
    save_file(weights(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    table = {}
    for number, names in enumerate((("layers.0.weight", "layers.2.weight"), ("layers.1.weight", "layers.3.weight"))):
        file = f"model-{number}.safetensors"
        save_file({name: weights()[name] for name in names}, tmp_path / file)
        table |= dict.fromkeys(names, file)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": table}))
    return tmp_path


def open_folder(folder: Path) -> WeightSource:
    return SafetensorsLoader().open(folder, SafetensorsLoader().config(folder))


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_tensors_come_back(layout: str, request: pytest.FixtureRequest) -> None:
    source = open_folder(request.getfixturevalue(layout))
    assert set(source.names()) == set(weights())
    for name, tensor in weights().items():
        assert source.shape(name) == (6, 4)
        assert torch.equal(source.get(name, torch.float32), tensor)
        assert torch.equal(source.get(name, torch.float32, slice(1, 5, 1)), tensor[1:5])
        assert torch.equal(source.get(name, torch.bfloat16), tensor.bfloat16())


def test_files_without_an_index_are_all_read(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert set(open_folder(sharded).names()) == set(weights())
    save_file({"layers.0.weight": torch.zeros(1)}, sharded / "other.safetensors")
    with pytest.raises(ValueError, match=r"layers\.0\.weight lies in both .*model-0.* and .*other"):
        open_folder(sharded)


def test_tensors_outlive_the_source(single: Path) -> None:
    source = open_folder(single)
    tensor = source.get("layers.1.weight", torch.float32)
    source.close()
    assert torch.equal(tensor, weights()["layers.1.weight"])


def test_missing_shard_is_named(sharded: Path) -> None:
    (sharded / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks model-1\.safetensors, which model\.safetensors\.index\.json names"):
        SafetensorsLoader().config(sharded)


def test_an_index_can_not_point_out_of_its_folder(sharded: Path) -> None:
    for name in ("../other/model.safetensors", "/etc/passwd", "sub/model.safetensors"):
        (sharded / INDEX).write_text(json.dumps({"weight_map": {"layers.0.weight": name}}))
        with pytest.raises(ValueError, match="is not a file of this folder"):
            SafetensorsLoader().config(sharded)


def test_index_without_a_map_is_refused(sharded: Path) -> None:
    (sharded / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(ValueError, match="has no weight_map"):
        SafetensorsLoader().config(sharded)


def test_truncated_files_are_refused_wherever_they_end(single: Path) -> None:
    file = single / "model.safetensors"
    data = file.read_bytes()
    for length in (0, 5, 40, len(data) // 2, len(data) - 1):
        file.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"model\.safetensors is truncated or no safetensors file"):
            open_folder(single)


def test_pickled_weights_are_never_read(single: Path) -> None:
    (single / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no weights \(\*\.safetensors\); for random ones say model\.loader"):
        SafetensorsLoader().config(single)
    (single / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert SafetensorsLoader().recognizes(single)
    with pytest.raises(ValueError, match=r"pickled weights only \(pytorch_model\.bin\).*convert them to safetensors"):
        SafetensorsLoader().config(single)


def test_absent_tensor_is_named(single: Path) -> None:
    source = open_folder(single)
    for read in (source.shape, lambda name: source.get(name, torch.float32)):
        with pytest.raises(KeyError, match=r"model\.safetensors lacks tensor layers\.9\.weight"):
            read("layers.9.weight")


def test_expectations_are_checked(sharded: Path) -> None:
    source = open_folder(sharded)
    source.expect({"layers.1.weight": (6, 4)})
    with pytest.raises(
        ValueError, match=r"model-1\.safetensors: tensor layers\.1\.weight has shape \[6, 4\], .*\[4, 6\]"
    ):
        source.expect({"layers.1.weight": (4, 6)})
    with pytest.raises(ValueError, match=r"lacks tensor layers\.8\.weight and 1 more that the config asks for"):
        source.expect({"layers.8.weight": (6, 4), "layers.9.weight": (6, 4)})


def test_shard_of_another_model_is_refused(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    config = SafetensorsLoader().config(tiny("qwen2"))
    changed = load_file(tiny("qwen2") / "model.safetensors")
    changed["model.layers.1.mlp.up_proj.weight"] = torch.zeros(96, 32)
    save_file(changed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"up_proj\.weight has shape \[96, 32\], the config asks for \[96, 64\]"):
        open_folder(tmp_path).expect(tensors(read_shape(config)))


def test_digest_tells_checkpoints_apart(single: Path) -> None:
    before = open_folder(single).digest()
    assert open_folder(single).digest() == before
    save_file(weights() | {"more": torch.zeros(2)}, single / "model.safetensors")
    assert open_folder(single).digest() != before


def test_only_folders_with_a_config_are_recognized(single: Path) -> None:
    assert SafetensorsLoader().recognizes(single)
    assert not SafetensorsLoader().recognizes(single / "model.safetensors")
    (single / "config.json").unlink()
    assert not SafetensorsLoader().recognizes(single)
