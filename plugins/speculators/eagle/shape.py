"""A draft head as data: one record read from its `config.json`. Imports no torch.

Reads three spellings: that of the EAGLE authors and of SpecForge (fields of a Llama config, extras under
`eagle_config`), and that of the speculators library (the layer's fields under `transformer_layer_config`). They count
the target's layers differently: `eagle_config` names layers whose output is wanted, speculators layers whose input is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from engine.checkpoint import count
from engine.rope import RopeSettings, read_rope

Generation = Literal["eagle", "eagle3"]
"""`eagle` is EAGLE-1 and EAGLE-2, which share their weights; `eagle3` includes EAGLE-3.1."""

_EAGLE3_WORDS: Final = ("eagle3", "eagle-3")
_AUX_IDS: Final = "eagle_aux_hidden_state_layer_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Everything that a head's mathematics depends on. Widths are elements, layers are the target's."""

    generation: Generation
    hidden: int  # width of the head
    target_hidden: int  # width of one of the target's states
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int  # of the target
    draft_vocab: int
    taps: int  # states of the target per token: 3 of its layers, or the one after its final norm
    tap_layers: tuple[int, ...] | None  # the state that enters each of these layers; None: the usual three
    eps: float
    rope: RopeSettings
    window: int | None = None  # tokens that a query of the head sees
    attention_bias: bool = False
    mlp_bias: bool = False
    fc_bias: bool = False
    norm_before_residual: bool = False  # the residual starts from the normalised state
    norm_before_fc: bool = False  # one norm over all states side by side
    fc_norm: bool = False  # one norm per state (EAGLE-3.1)
    norm_output: bool = False  # the next step continues from the normalised state (EAGLE-3.1)

    @property
    def layer_input(self) -> int:
        """Width of what q, k and v are made of: embedding and state side by side, or one vector fused of both."""
        return 2 * self.hidden if self.generation == "eagle3" else self.hidden

    @property
    def fc_input(self) -> int:
        """Width of what `fc` takes."""
        states = self.taps * self.target_hidden
        return states if self.generation == "eagle3" else states + self.hidden

    def hidden_layers(self, target_layers: int) -> tuple[int, ...]:
        """The layers whose incoming states are wanted of a target with so many; none for `eagle`.

        The usual three are those of the EAGLE-3 authors: the third, the middle one, and the third from the end.

        Raises:
            ValueError: the target has too few layers.
        """
        if self.generation == "eagle":
            return ()
        wanted = self.tap_layers or (2, target_layers // 2, target_layers - 3)
        if any(not 0 <= layer <= target_layers for layer in wanted):
            raise ValueError(
                f"the head wants the states that enter layers {', '.join(map(str, wanted))} of its target, "
                f"which has {target_layers} layers; use the model that the head was trained for"
            )
        return wanted


def read_shape(config: Mapping[str, Any]) -> HeadShape:
    """Read the record off a head's `config.json`.

    Raises:
        ValueError: a field is missing, malformed or asks for what is not implemented; the sentence names it.
    """
    fields = _flat(config)
    _refuse_other_mathematics(fields)
    generation = _generation(fields)
    eagle3 = generation == "eagle3"
    heads, hidden = count(fields, "num_attention_heads"), count(fields, "hidden_size")
    kv_heads = count(fields, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(fields, "head_dim", hidden // heads)
    vocab = count(fields, "vocab_size")
    tap_layers = _tap_layers(fields)
    attention_bias = bool(fields.get("attention_bias", False))
    return HeadShape(
        generation=generation,
        hidden=hidden,
        target_hidden=count(fields, "target_hidden_size", hidden),
        intermediate=count(fields, "intermediate_size"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        draft_vocab=count(fields, "draft_vocab_size", vocab) if eagle3 else vocab,
        taps=len(tap_layers or ()) or count(fields, "num_aux_hidden_states", 3) if eagle3 else 1,
        tap_layers=tap_layers if eagle3 else None,
        eps=_eps(fields),
        rope=read_rope(fields, head_dim),
        window=_window(fields),
        attention_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias", False)),
        fc_bias=bool(fields.get("bias", False)) and not eagle3,
        norm_before_residual=eagle3 and bool(fields.get("norm_before_residual", False)),
        norm_before_fc=eagle3 and bool(fields.get("norm_before_fc", False)),
        fc_norm=eagle3 and bool(fields.get("fc_norm", False)),
        norm_output=eagle3 and bool(fields.get("norm_output", False)),
    )


def tensors(shape: HeadShape) -> dict[str, tuple[int, ...]]:
    """Name, in the EAGLE authors' spelling, and shape of every weight a head can't do without.

    Besides these a file may hold `embed_tokens.weight` (else the target's is used), `d2t` and `t2d`.
    """
    at = "midlayer"
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    rows = [
        ("fc", shape.hidden, shape.fc_input, shape.fc_bias),
        (f"{at}.self_attn.q_proj", q, shape.layer_input, shape.attention_bias),
        (f"{at}.self_attn.k_proj", kv, shape.layer_input, shape.attention_bias),
        (f"{at}.self_attn.v_proj", kv, shape.layer_input, shape.attention_bias),
        (f"{at}.self_attn.o_proj", shape.hidden, q, shape.attention_bias),
        (f"{at}.mlp.gate_proj", shape.intermediate, shape.hidden, shape.mlp_bias),
        (f"{at}.mlp.up_proj", shape.intermediate, shape.hidden, shape.mlp_bias),
        (f"{at}.mlp.down_proj", shape.hidden, shape.intermediate, shape.mlp_bias),
    ]
    named: dict[str, tuple[int, ...]] = {}
    for name, out, inside, biased in rows:
        named[f"{name}.weight"] = (out, inside)
        if biased:
            named[f"{name}.bias"] = (out,)
    named[f"{at}.post_attention_layernorm.weight"] = (shape.hidden,)
    if shape.generation == "eagle":
        return named
    named |= {f"{at}.{name}.weight": (shape.hidden,) for name in ("input_layernorm", "hidden_norm")}
    if shape.norm_before_fc:
        named["input_norm.weight"] = (shape.fc_input,)
    if shape.fc_norm:
        named |= {f"fc_norm.{tap}.weight": (shape.target_hidden,) for tap in range(shape.taps)}
    named["norm.weight"] = (shape.hidden,)
    named["lm_head.weight"] = (shape.draft_vocab, shape.hidden)
    return named


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """All fields side by side, whichever spelling the file is in; what is null counts as absent."""
    inner = config.get("transformer_layer_config") or {}
    extra = config.get("eagle_config") or {}
    for name, section in (("transformer_layer_config", inner), ("eagle_config", extra)):
        if not isinstance(section, Mapping):
            raise ValueError(f"{name} must be a mapping, not {section!r}")
    fields = {name: value for name, value in inner.items() if name != "architectures"}
    fields |= {name: value for name, value in config.items() if value is not None}
    fields |= {name: value for name, value in extra.items() if name != _AUX_IDS}
    if (outputs := extra.get(_AUX_IDS)) is not None:
        fields[_AUX_IDS] = [layer + 1 if isinstance(layer, int) else layer for layer in outputs]
    return {name: value for name, value in fields.items() if value is not None}


def _generation(fields: Mapping[str, Any]) -> Generation:
    architectures = fields.get("architectures") or []
    if not isinstance(architectures, list):
        raise ValueError(f"architectures must be a list of names, not {architectures!r}")
    told = [*architectures, fields.get("speculators_model_type"), fields.get("model_type")]
    words = " ".join(str(word).lower() for word in told)
    return "eagle3" if "draft_vocab_size" in fields or any(word in words for word in _EAGLE3_WORDS) else "eagle"


def _eps(fields: Mapping[str, Any]) -> float:
    eps = fields.get("rms_norm_eps", 1e-6)
    if not isinstance(eps, int | float) or eps < 0:
        raise ValueError(f"rms_norm_eps must be a number of at least 0, not {eps!r}")
    return float(eps)


def _tap_layers(fields: Mapping[str, Any]) -> tuple[int, ...] | None:
    layers = fields.get(_AUX_IDS)
    if layers is None:
        return None
    if not isinstance(layers, list) or not layers or any(not isinstance(x, int) or x < 0 for x in layers):
        raise ValueError(f"{_AUX_IDS} must be a list of layers, not {layers!r}")
    if layers != sorted(set(layers)):
        raise ValueError(f"{_AUX_IDS} is {layers}; layers in ascending order are implemented")
    return tuple(layers)


def _window(fields: Mapping[str, Any]) -> int | None:
    """Qwen's configs carry a window that counts only with `use_sliding_window`."""
    kinds = fields.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ValueError(f"layer_types must be a list of kinds, not {kinds!r}")
    sliding = kinds[0] == "sliding_attention" if kinds else bool(fields.get("use_sliding_window", False))
    return count(fields, "sliding_window") if sliding else None


def _refuse_other_mathematics(fields: Mapping[str, Any]) -> None:
    if (activation := fields.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not implemented; EAGLE heads here know 'silu'")
    if (layers := fields.get("num_hidden_layers", 1)) != 1:
        raise ValueError(f"num_hidden_layers is {layers}; EAGLE heads here have one layer")
    if fields.get("quantization_config"):
        raise ValueError("quantization_config is not implemented for EAGLE heads; use a dense one")


__all__ = ["Generation", "HeadShape", "read_shape", "tensors"]
