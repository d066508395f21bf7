"""Small GGUF files, written with the `gguf` package: an independent hand at the format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Writer = Callable[..., Path]

METADATA = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "sliding_window": "attention.sliding_window",
}
TENSORS = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{TENSORS[rest]}.{kind}"
    return f"{TENSORS[stem]}.{kind}"


def _interleaved(array: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Rows of each head alternate between its two rotating halves, as llama.cpp's converter leaves them."""
    halves = array.reshape(heads, 2, -1, *array.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(array.shape)


@pytest.fixture(scope="session")
def write_gguf(tmp_path_factory: pytest.TempPathFactory) -> Writer:
    """Write tensors under checkpoint names, and what a config says, as a GGUF file of an architecture."""

    def write(
        arch: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray[Any, Any]],
        packing: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
        extra: Mapping[str, Any] | None = None,
    ) -> Path:
        path = tmp_path_factory.mktemp("gguf") / f"tiny-{arch}.gguf"
        writer = gguf.GGUFWriter(path, arch)
        for field, key in METADATA.items():
            if config.get(field) is not None:
                writer.add_uint32(f"{arch}.{key}", config[field])
        writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
        writer.add_float32(f"{arch}.rope.freq_base", config["rope_parameters"]["rope_theta"])
        for key, value in (extra or {}).items():
            _add(writer, key, value)
        for name, array in tensors.items():
            if arch == "llama" and ("q_proj" in name or "k_proj" in name):
                array = _interleaved(
                    array, config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
                )
            packed = packing if name.endswith("proj.weight") else gguf.GGMLQuantizationType.F32
            written = name if name.startswith("rope_freqs") else _gguf_name(name)
            writer.add_tensor(written, gguf.quants.quantize(array, packed), raw_dtype=packed)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    kinds: dict[type, Callable[[str, Any], None]] = {
        str: writer.add_string,
        bool: writer.add_bool,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    kinds[type(value)](key, value)
