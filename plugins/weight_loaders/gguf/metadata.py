"""The `config.json` that a GGUF file's metadata amount to."""

from __future__ import annotations

import struct
from typing import Any, Final

from engine.plugins.weight_loaders.gguf.format import Header
from engine.plugins.weight_loaders.gguf.names import ARCHITECTURES, ROPE_FACTORS

_DTYPES: Final = {0: "float32", 1: "float16"}  # by general.file_type; quantised files were made of bfloat16
_STOPS: Final = ("eos_token_id", "eot_token_id", "eom_token_id")


def config_from(header: Header) -> dict[str, Any]:
    """Fields under their Hugging Face names.

    Raises:
        ValueError: the architecture is not one of the family, or a field is missing.
    """
    meta = header.metadata
    arch = meta.get("general.architecture")
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{header.path} has GGUF architecture {arch!r}; only {known} can be read from GGUF")
    if meta.get("split.count", 0) > 1:
        raise ValueError(
            f"{header.path} is one of {meta['split.count']} parts; join them with llama-gguf-split --merge"
        )

    def read(field: str, default: Any = None) -> Any:
        value = meta.get(f"{arch}.{field}", default)
        if value is None:
            raise ValueError(f"{header.path} lacks the metadata field {arch}.{field}")
        return value

    if read("expert_count", 0):
        raise ValueError(f"{header.path} is a mixture of experts ({arch}.expert_count), which can't be read from GGUF")
    heads = read("attention.head_count")
    if not isinstance(heads, int) or heads < 1:
        raise ValueError(f"{header.path}: {arch}.attention.head_count must be a positive integer, not {heads!r}")
    window = meta.get(f"{arch}.attention.sliding_window")
    config: dict[str, Any] = {
        "architectures": ["MistralForCausalLM" if arch == "llama" and window else ARCHITECTURES[arch]],
        "model_type": "mistral" if arch == "llama" and window else arch,
        "hidden_size": read("embedding_length"),
        "intermediate_size": read("feed_forward_length"),
        "num_hidden_layers": read("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": read("attention.head_count_kv", heads),
        "head_dim": read("attention.key_length", read("embedding_length") // heads),
        "vocab_size": _vocab_size(header),
        "max_position_embeddings": read("context_length"),
        "rms_norm_eps": read("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "sliding_window": window,
        "rope_parameters": _rope(header, arch),
        "dtype": _DTYPES.get(meta.get("general.file_type", 0), "bfloat16"),
        "bos_token_id": meta.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": stop_token_ids(header),
    }
    return config


def stop_token_ids(header: Header) -> list[int]:
    """Tokens that end a text or a turn."""
    found = (header.metadata.get(f"tokenizer.ggml.{field}") for field in _STOPS)
    return list(dict.fromkeys(token for token in found if token is not None))


def _vocab_size(header: Header) -> int:
    if (embedding := header.tensors.get("token_embd.weight")) is None:
        raise ValueError(f"{header.path} lacks tensor token_embd.weight")
    return embedding.shape[0]


def _rope(header: Header, arch: str) -> dict[str, Any]:
    meta = header.metadata
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": meta.get(f"{arch}.rope.freq_base", 10000.0)}
    kind = meta.get(f"{arch}.rope.scaling.type", "none")
    trained = meta.get(f"{arch}.rope.scaling.original_context_length") or meta.get(f"{arch}.context_length")
    if ROPE_FACTORS in header.tensors:  # Llama 3 stretches each frequency by a number of its own
        factors = _floats(header, ROPE_FACTORS)
        rope |= {"rope_type": "longrope", "short_factor": factors, "long_factor": factors, "factor": 1.0}
        return rope | {"original_max_position_embeddings": trained}
    if kind == "none":
        return rope
    if kind not in ("linear", "yarn"):
        raise ValueError(f"{header.path}: {arch}.rope.scaling.type {kind!r} is not implemented")
    rope |= {"rope_type": kind, "factor": meta.get(f"{arch}.rope.scaling.factor", 1.0)}
    if kind == "yarn":
        rope["original_max_position_embeddings"] = trained
        if (scale := meta.get(f"{arch}.rope.scaling.attn_factor")) is not None:
            rope["attention_factor"] = scale
    return rope


def _floats(header: Header, name: str) -> list[float]:
    entry = header.tensors[name]
    if entry.format.name != "F32":
        raise ValueError(f"{header.path}: tensor {name} is {entry.format.name}, not F32")
    with header.path.open("rb") as file:
        file.seek(entry.offset)
        return list(struct.unpack(f"<{entry.nbytes // 4}f", file.read(entry.nbytes)))


__all__ = ["config_from", "stop_token_ids"]
