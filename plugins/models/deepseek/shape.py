"""DeepSeek V2 and V3 as data: one record read from `config.json`. Imports no torch.

The profile, the names and shapes of the weights, and the decoder are all made from this record.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from engine.checkpoint import count
from engine.plugin import KVKind
from engine.rope import RopeSettings, context_limit, read_rope
from engine.routing import Routing
from engine.specs.model import ModelProfile

FAMILIES: Final[Mapping[str, Literal["softmax", "sigmoid"]]] = {
    "DeepseekV2ForCausalLM": "softmax",
    "DeepseekV3ForCausalLM": "sigmoid",
}
"""Architecture -> how it scores experts unless `scoring_func` says."""

METHODS: Final[Mapping[str, frozenset[str]]] = {
    "softmax": frozenset({"greedy", "group_limited_greedy"}),
    "sigmoid": frozenset({"noaux_tc"}),
}
"""Scoring -> the ways of choosing experts that are implemented with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekShape:
    """Everything that the decoder needs to know of a model."""

    architecture: str
    layers: int
    hidden: int
    heads: int
    q_rank: int | None  # width of the compressed query; None: queries are projected in one product
    latent: int  # width of the compressed keys and values
    nope: int  # per head, elements of a key without position
    rope_dim: int  # elements of a key that rotate, shared by all heads
    v_dim: int  # per head
    intermediate: int  # of the dense layers
    dense_layers: int  # how many layers, from the first, are dense
    expert_intermediate: int
    routing: Routing | None  # None: every layer is dense; experts that all tokens share are its `always`
    vocab: int
    eps: float
    tied: bool
    interleaved: bool  # rotated pairs are neighbours in the checkpoint, not halves
    rope: RopeSettings
    scale: float  # of the scores
    next_layers: int  # layers behind the last that look a token further ahead
    block: tuple[int, int] | None  # projections are stored in FP8, a scale for each block of this size

    @property
    def row(self) -> int:
        """Elements kept for one token and layer: the latent, and the rotated key that all heads share."""
        return self.latent + self.rope_dim


def read_shape(config: Mapping[str, Any]) -> DeepseekShape:
    """Read the record off a `config.json`.

    Raises:
        ValueError: a field is missing, malformed or asks for what is not implemented; the sentence names it.
    """
    architecture = next((name for name in config.get("architectures") or () if name in FAMILIES), None)
    if architecture is None:
        raise ValueError(f"architectures is {config.get('architectures')!r}; implemented are {', '.join(FAMILIES)}")
    _refuse_other_mathematics(config)
    nope, rope_dim = count(config, "qk_nope_head_dim"), count(config, "qk_rope_head_dim")
    layers = count(config, "num_hidden_layers")
    routing = _routing(config, FAMILIES[architecture]) if config.get("n_routed_experts") else None
    rope = read_rope(config, rope_dim)
    return DeepseekShape(
        architecture=architecture,
        layers=layers,
        hidden=count(config, "hidden_size"),
        heads=count(config, "num_attention_heads"),
        q_rank=count(config, "q_lora_rank") if config.get("q_lora_rank") is not None else None,
        latent=count(config, "kv_lora_rank"),
        nope=nope,
        rope_dim=rope_dim,
        v_dim=count(config, "v_head_dim"),
        intermediate=count(config, "intermediate_size"),
        dense_layers=min(int(config.get("first_k_dense_replace") or 0), layers) if routing else layers,
        expert_intermediate=count(config, "moe_intermediate_size") if routing else 0,
        routing=routing,
        vocab=count(config, "vocab_size"),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        interleaved=bool(config.get("rope_interleave", True)),
        rope=rope,
        scale=_scale(rope, nope + rope_dim),
        next_layers=int(config.get("num_nextn_predict_layers") or 0),
        block=_block(config.get("quantization_config")),
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
        kv_kind=KVKind.MLA,
        heads=shape.heads,
        kv_heads=1,
        head_dim=shape.row,
        v_head_dim=shape.latent,
        scale=shape.scale,
        windows=(None,) * shape.layers,
        softcap=None,
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else (() if eos is None else (eos,)),
        parameters=sum(math.prod(size) for size in tensors(shape).values()),
        expanded=(shape.nope + shape.rope_dim, shape.v_dim),
    )


def weights(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every weight that the decoder reads; raises as `read_shape` does."""
    return tensors(read_shape(config))


def tensors(shape: DeepseekShape) -> dict[str, tuple[int, ...]]:
    """The same for a record: all projections are [out, in], in the order of the layers."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for index in range(shape.layers):
        named |= _layer(shape, index)
    named["model.norm.weight"] = (shape.hidden,)
    if not shape.tied:
        named["lm_head.weight"] = (shape.vocab, shape.hidden)
    return named


def next_tensors(shape: DeepseekShape, index: int) -> dict[str, tuple[int, ...]]:
    """Those of the layer `index`, behind the last, that looks a token further ahead."""
    at = f"model.layers.{index}."
    norms = {f"{at}{name}.weight": (shape.hidden,) for name in ("enorm", "hnorm", "shared_head.norm")}
    return _layer(shape, index) | norms | {f"{at}eh_proj.weight": (shape.hidden, 2 * shape.hidden)}


def _layer(shape: DeepseekShape, index: int) -> dict[str, tuple[int, ...]]:
    at = f"model.layers.{index}."
    named: dict[str, tuple[int, ...]] = {f"{at}{name}.weight": size for name, size in _attention(shape)}
    named |= {f"{at}{name}": size for name, size in _feed_forward(shape, index)}
    return named | {f"{at}{name}.weight": (shape.hidden,) for name in ("input_layernorm", "post_attention_layernorm")}


def _attention(shape: DeepseekShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    queries = shape.heads * (shape.nope + shape.rope_dim)
    if shape.q_rank is None:
        yield "self_attn.q_proj", (queries, shape.hidden)
    else:
        yield "self_attn.q_a_proj", (shape.q_rank, shape.hidden)
        yield "self_attn.q_a_layernorm", (shape.q_rank,)
        yield "self_attn.q_b_proj", (queries, shape.q_rank)
    yield "self_attn.kv_a_proj_with_mqa", (shape.row, shape.hidden)
    yield "self_attn.kv_a_layernorm", (shape.latent,)
    yield "self_attn.kv_b_proj", (shape.heads * (shape.nope + shape.v_dim), shape.latent)
    yield "self_attn.o_proj", (shape.hidden, shape.heads * shape.v_dim)


def _feed_forward(shape: DeepseekShape, layer: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    if shape.routing is None or layer < shape.dense_layers:
        yield from _mlp("mlp", shape.hidden, shape.intermediate)
        return
    yield "mlp.gate.weight", (shape.routing.experts, shape.hidden)
    if shape.routing.corrected:
        yield "mlp.gate.e_score_correction_bias", (shape.routing.experts,)
    for expert in range(shape.routing.experts):
        yield from _mlp(f"mlp.experts.{expert}", shape.hidden, shape.expert_intermediate)
    if shared := shape.routing.always:
        yield from _mlp("mlp.shared_experts", shape.hidden, shared * shape.expert_intermediate)


def _mlp(at: str, hidden: int, inner: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{at}.gate_proj.weight", (inner, hidden)
    yield f"{at}.up_proj.weight", (inner, hidden)
    yield f"{at}.down_proj.weight", (hidden, inner)


def _routing(config: Mapping[str, Any], default: Literal["softmax", "sigmoid"]) -> Routing:
    scoring = config.get("scoring_func") or default
    if scoring not in METHODS:
        raise ValueError(f"scoring_func {scoring!r} is not implemented; known are {', '.join(METHODS)}")
    method = config.get("topk_method") or {"softmax": "greedy", "sigmoid": "noaux_tc"}[scoring]
    if method not in METHODS[scoring]:
        known = ", ".join(sorted(METHODS[scoring]))
        raise ValueError(f"topk_method {method!r} is not implemented for scoring_func {scoring!r}; known are {known}")
    if int(config.get("moe_layer_freq") or 1) != 1:
        raise ValueError(f"moe_layer_freq {config['moe_layer_freq']} is not implemented; known is 1")
    experts, grouped = count(config, "n_routed_experts"), method != "greedy"
    groups = count(config, "n_group", 1) if grouped else 1
    chosen, chosen_groups = count(config, "num_experts_per_tok"), count(config, "topk_group", 1) if grouped else 1
    if experts % groups or chosen_groups > groups:
        raise ValueError(f"n_group {groups} must divide n_routed_experts {experts}, topk_group {chosen_groups} be less")
    if chosen > experts // groups * chosen_groups:
        raise ValueError(f"num_experts_per_tok {chosen} is more than {chosen_groups} of {groups} groups hold")
    return Routing(
        scoring=scoring,
        experts=experts,
        chosen=chosen,
        groups=groups,
        chosen_groups=chosen_groups,
        normalize=bool(config.get("norm_topk_prob", scoring == "sigmoid")),
        scale=float(config.get("routed_scaling_factor", 1.0)),
        corrected=method == "noaux_tc",
        always=int(config.get("n_shared_experts") or 0),
    )


def _block(packed: Any) -> tuple[int, int] | None:
    if not packed:
        return None
    fields = packed if isinstance(packed, Mapping) else {"quant_method": packed}
    method, size = fields.get("quant_method"), fields.get("weight_block_size")
    if method != "fp8" or not size or len(size) != 2:
        raise ValueError(f"quantization_config: {method!r} with blocks of {size} can't be read; known is fp8 in blocks")
    return int(size[0]), int(size[1])


def _scale(rope: RopeSettings, width: int) -> float:
    """One over the root of a key's width; YaRN with `mscale_all_dim` sharpens the scores by its square."""
    sharpened = 1.0
    if rope.kind == "yarn" and rope.mscale_all_dim and rope.factor > 1.0:
        sharpened = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    return float(width**-0.5) * sharpened**2


def _refuse_other_mathematics(config: Mapping[str, Any]) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not implemented; DeepSeek here knows 'silu'")
    if config.get("attention_bias"):
        raise ValueError("attention_bias: true is not implemented; DeepSeek's projections have none here")


__all__ = ["FAMILIES", "DeepseekShape", "next_tensors", "read_profile", "read_shape", "tensors", "weights"]
