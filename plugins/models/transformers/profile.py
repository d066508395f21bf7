"""A profile for any decoder, read off its `config.json` by the names that architectures give to the same things.

What is read here is compared with what the model really does before it serves (see `binding`), so a wrong guess is an
error at start, never a wrong text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from engine.plugin import KVKind
from engine.rope import context_limit, read_rope
from engine.specs.model import ModelProfile

_NAMES: Final = {
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "hidden": ("hidden_size", "n_embd", "d_model"),
    "heads": ("num_attention_heads", "n_head", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads"),
    "context": ("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"),
    "inner": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
}
_ALTERNATION: Final = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
"""Every n-th layer of these sees everything, the others a window, where `layer_types` doesn't say."""


def read_profile(config: Mapping[str, Any]) -> ModelProfile:
    """What the engine may know.

    Raises:
        ValueError: the config lacks a size, or asks for what the engine's attention can't do; the sentence names it.
    """
    if config.get("kv_lora_rank"):
        raise ValueError("kv_lora_rank: latent attention (MLA) can't run through the transformers fallback")
    if config.get("is_encoder_decoder"):
        raise ValueError("is_encoder_decoder: only decoders can be served")
    if packed := config.get("quantization_config"):
        method = packed.get("quant_method") if isinstance(packed, Mapping) else packed
        raise ValueError(f"quantization_config: weights packed as {method!r} can't be read; use a dense checkpoint")
    layers, hidden, heads = (_size(config, what) for what in ("layers", "hidden", "heads"))
    kv_heads = 1 if config.get("multi_query") else _size(config, "kv_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = config.get("head_dim") or hidden // heads
    eos = config.get("eos_token_id")
    return ModelProfile(
        architecture=(config.get("architectures") or ["unknown"])[0],
        layers=layers,
        hidden_size=hidden,
        vocab_size=int(config["vocab_size"]),
        max_context=_context(config, head_dim),
        kv_kind=KVKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=_scale(config, head_dim),
        windows=_windows(config, layers),
        softcap=config.get("attn_logit_softcapping"),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        parameters=_parameters(config, layers, hidden, (2 * heads + 2 * kv_heads) * head_dim),
    )


def _size(config: Mapping[str, Any], what: str, default: int | None = None) -> int:
    for name in _NAMES[what]:
        if (value := config.get(name)) is not None:
            if not isinstance(value, int) or value <= 0:
                raise ValueError(f"{name} must be a positive integer, not {value!r}")
            return value
    if default is None:
        raise ValueError(f"{_NAMES[what][0]} is missing")
    return default


def _context(config: Mapping[str, Any], head_dim: int) -> int:
    """`longrope` picks its frequencies by the longest text of a batch, which would make neighbours matter: such models
    are served within the context they were trained for. Kinds of rotation unknown here don't change the limit."""
    try:
        rope = read_rope(config, head_dim)
    except ValueError:
        return _size(config, "context")
    if rope.kind == "longrope":
        return rope.trained_context
    return context_limit({"max_position_embeddings": _size(config, "context")}, rope)


def _scale(config: Mapping[str, Any], head_dim: int) -> float:
    if config.get("attention_multiplier") is not None:  # Granite
        return float(config["attention_multiplier"])
    width = float(config.get("query_pre_attn_scalar") or head_dim)  # Gemma's own, or everybody's
    return float(width**-0.5)


def _windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * layers
    period = config.get("sliding_window_pattern") or _ALTERNATION.get(config.get("model_type", ""))
    if types := config.get("layer_types"):
        return tuple(window if kind == "sliding_attention" else None for kind in types)
    if period:
        return tuple(None if (layer + 1) % period == 0 else window for layer in range(layers))
    return (window,) * layers


def _parameters(config: Mapping[str, Any], layers: int, hidden: int, attention_rows: int) -> int:
    """Counted from below: embeddings, attention, and the two matrices that every feed-forward layer has."""
    inner = _size(config, "inner", 4 * hidden)
    experts = int(config.get("num_experts") or config.get("num_local_experts") or 1)
    inner = int(config.get("moe_intermediate_size") or inner) * experts
    return int(config["vocab_size"]) * hidden + layers * hidden * (attention_rows + 2 * inner)


__all__ = ["read_profile"]
