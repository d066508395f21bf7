"""The Llama family as data: one record says how a member differs from its siblings, read from `config.json`.

Imports no torch; the profile, the names and shapes of the weights, and the decoder are all made from this record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any, Final, Literal

from engine.checkpoint import count
from engine.plugin import KVKind
from engine.plugins.models.llama.experts import dense_layers, read_routing
from engine.rope import RopeSettings, context_limit, read_rope
from engine.routing import Routing
from engine.specs.model import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderShape:
    """Everything that the decoder needs to know of a model."""

    architecture: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    eps: float
    qkv_bias: bool
    out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    tied: bool  # the output layer is the embedding
    windows: tuple[int | None, ...]  # per layer, tokens seen
    rope: RopeSettings
    routing: Routing | None = None  # None: no layer has experts
    dense: frozenset[int] = frozenset()  # layers without experts, where others have some
    expert_intermediate: int = 0

    def routed(self, layer: int) -> bool:
        """Whether the layer has experts."""
        return self.routing is not None and layer not in self.dense


@dataclass(frozen=True, slots=True)
class _Family:
    """What an architecture fixes, whatever its config says; None leaves it to the config."""

    qkv_bias: bool | None = None
    out_bias: bool | None = None
    mlp_bias: bool | None = False
    qk_norm: bool = False
    head_dim: int | None = None
    window: Literal["never", "always", "if used", "by layer"] = "by layer"
    experts: bool = False


FAMILIES: Final[Mapping[str, _Family]] = {
    "LlamaForCausalLM": _Family(mlp_bias=None, window="never"),
    "MistralForCausalLM": _Family(qkv_bias=False, out_bias=False, window="always"),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, out_bias=False),
    "Qwen3ForCausalLM": _Family(qk_norm=True, head_dim=128),
    "Qwen3MoeForCausalLM": _Family(qk_norm=True, window="if used", experts=True),
}


def read_shape(config: Mapping[str, Any]) -> DecoderShape:
    """Read the record off a `config.json`.

    Raises:
        ValueError: a field is missing, malformed or asks for what is not implemented; the sentence names it.
    """
    architecture = next((name for name in config.get("architectures") or () if name in FAMILIES), None)
    if architecture is None:
        raise ValueError(f"architectures is {config.get('architectures')!r}; implemented are {', '.join(FAMILIES)}")
    _refuse_other_mathematics(config)
    family = FAMILIES[architecture]
    heads, hidden = count(config, "num_attention_heads"), count(config, "hidden_size")
    kv_heads = count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(config, "head_dim", family.head_dim or hidden // heads)
    layers = count(config, "num_hidden_layers")
    attention_bias = bool(config.get("attention_bias", False))
    return DecoderShape(
        architecture=architecture,
        layers=layers,
        hidden=hidden,
        intermediate=count(config, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=count(config, "vocab_size"),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        qkv_bias=attention_bias if family.qkv_bias is None else family.qkv_bias,
        out_bias=attention_bias if family.out_bias is None else family.out_bias,
        mlp_bias=bool(config.get("mlp_bias", False)) if family.mlp_bias is None else family.mlp_bias,
        qk_norm=family.qk_norm,
        tied=bool(config.get("tie_word_embeddings", False)),
        windows=_windows(config, family, layers),
        rope=read_rope(config, head_dim),
        routing=read_routing(config) if family.experts else None,
        dense=dense_layers(config, layers) if family.experts else frozenset(),
        expert_intermediate=count(config, "moe_intermediate_size") if family.experts else 0,
    )


def read_profile(config: Mapping[str, Any]) -> ModelProfile:
    """What the engine may know; raises as `read_shape` does."""
    shape = read_shape(config)
    eos = config.get("eos_token_id")
    return ModelProfile(
        architecture=shape.architecture,
        layers=shape.layers,
        hidden_size=shape.hidden,
        vocab_size=shape.vocab,
        max_context=context_limit(config, shape.rope),
        kv_kind=KVKind.GQA,
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        windows=shape.windows,
        softcap=None,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        parameters=sum(prod(size) for size in tensors(shape).values()),
    )


def weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the decoder reads; raises as `read_shape` does."""
    return tensors(read_shape(config))


def tensors(shape: DecoderShape) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the decoder reads, in the order of the layers."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for index in range(shape.layers):
        at = f"model.layers.{index}."
        rows = [
            ("self_attn.q_proj", q, shape.hidden, shape.qkv_bias),
            ("self_attn.k_proj", kv, shape.hidden, shape.qkv_bias),
            ("self_attn.v_proj", kv, shape.hidden, shape.qkv_bias),
            ("self_attn.o_proj", shape.hidden, q, shape.out_bias),
            *_feed_forward(shape, index),
        ]
        for name, out, inside, biased in rows:
            named[f"{at}{name}.weight"] = (out, inside)
            if biased:
                named[f"{at}{name}.bias"] = (out,)
        if shape.qk_norm:
            named |= {f"{at}self_attn.{name}.weight": (shape.head_dim,) for name in ("q_norm", "k_norm")}
        named |= {f"{at}{name}.weight": (shape.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
    named["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        named["lm_head.weight"] = (shape.vocab, shape.hidden)
    return named


def _feed_forward(shape: DecoderShape, layer: int) -> list[tuple[str, int, int, bool]]:
    """Name, rows, columns and whether there is a bias, of each matrix."""
    if shape.routing is None or not shape.routed(layer):
        return _mlp("mlp", shape.intermediate, shape)
    networks = [_mlp(f"mlp.experts.{e}", shape.expert_intermediate, shape) for e in range(shape.routing.experts)]
    return [("mlp.gate", shape.routing.experts, shape.hidden, False), *chain.from_iterable(networks)]


def _mlp(at: str, inner: int, shape: DecoderShape) -> list[tuple[str, int, int, bool]]:
    return [
        (f"{at}.gate_proj", inner, shape.hidden, shape.mlp_bias),
        (f"{at}.up_proj", inner, shape.hidden, shape.mlp_bias),
        (f"{at}.down_proj", shape.hidden, inner, shape.mlp_bias),
    ]


def _refuse_other_mathematics(config: Mapping[str, Any]) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not implemented; the Llama family here knows 'silu'")
    if packed := config.get("quantization_config"):
        method = packed.get("quant_method") if isinstance(packed, Mapping) else packed
        raise ValueError(f"quantization_config: weights packed as {method!r} can't be read; use a dense checkpoint")


def _windows(config: Mapping[str, Any], family: _Family, layers: int) -> tuple[int | None, ...]:
    """Per layer, how many tokens a query sees.

    Qwen's configs carry a sliding window that counts only with `use_sliding_window`, and then from layer
    `max_window_layers` on unless `layer_types` says which.
    """
    window = config.get("sliding_window")
    if family.window == "always":
        return (window,) * layers
    if family.window == "never":
        return (None,) * layers
    if family.window == "if used":
        return (window if config.get("use_sliding_window", False) else None,) * layers
    if not config.get("use_sliding_window", False):
        window = None
    first = config.get("max_window_layers", 28)
    types = config.get("layer_types") or [
        "sliding_attention" if i >= first else "full_attention" for i in range(layers)
    ]
    if len(types) != layers:
        raise ValueError(f"layer_types has {len(types)} entries for {layers} layers")
    if other := set(types) - {"sliding_attention", "full_attention"}:
        raise ValueError(f"layer_types names {min(other)!r}, which is not implemented")
    return tuple(window if kind == "sliding_attention" else None for kind in types)


__all__ = ["FAMILIES", "DecoderShape", "read_profile", "read_shape", "tensors", "weights"]
