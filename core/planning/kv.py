"""Bytes of keys and values: what a model keeps for a token, and what it would keep with another form of attention."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.capabilities import KVKind
from engine.eight_bits import packed_heads_bytes
from engine.latent.widths import packed_bytes
from engine.specs.model import ModelProfile

LATENT_FP8_ROW: Final = 656
"""Bytes of FlashMLA's FP8 row: 512 latent elements in e4m3, four float32 scales, 64 rotary elements in bfloat16."""

_LATENT: Final = (512, 64)
"""Latent and rotary width of every DeepSeek model, for comparing a model that has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVForm:
    """One way to keep keys and values."""

    name: str  # "mha", "gqa8", "mla", "mla-fp8"
    meaning: str
    elements: int  # for one token over all layers
    row_bytes: int | None = None  # per token and layer, where the format fixes it whatever the dtype

    def bytes_per_token(self, layers: int, itemsize: int) -> int:
        """Bytes for one token over all layers, with elements of `itemsize` bytes."""
        return self.elements * itemsize if self.row_bytes is None else self.row_bytes * layers


def own_form(profile: ModelProfile, packed_beside: int | None = None) -> KVForm:
    """How the model really keeps them.

    Args:
        packed_beside: bytes of an element of the model, where the cache keeps 8 bits.
    """
    latent = profile.kv_kind is KVKind.MLA
    meaning = "one latent row for all heads" if latent else f"{profile.kv_heads} heads of keys and values"
    row = None
    if packed_beside is not None:
        widths = profile.head_dim, profile.v_head_dim
        row = packed_bytes(*widths, packed_beside) if latent else packed_heads_bytes(profile.kv_heads, *widths)
        meaning = f"{meaning}, in 8 bits"
    return KVForm(name="as built", meaning=meaning, elements=profile.kv_elements_per_token, row_bytes=row)


def compared(name: str, profile: ModelProfile, config: Mapping[str, Any]) -> KVForm:
    """The form called `name` for a model of this size: `mha`, `gqaN` with N key-value heads, `mla` or `mla-fp8`.

    Heads are as wide as the model's own; `mha` of a latent model is its expanded form, rotary part included, and `gqaN`
    what an ordinary model with heads of its values' width would keep.

    Raises:
        ValueError: the name is none of these.
    """
    latent, rotary = int(config.get("kv_lora_rank") or _LATENT[0]), int(config.get("qk_rope_head_dim") or _LATENT[1])
    if name in ("mla", "mla-fp8"):
        width, fixed = latent + rotary, LATENT_FP8_ROW if name == "mla-fp8" else None
        return KVForm(
            name=name,
            meaning=f"one row of {latent} + {rotary} for all heads",
            elements=profile.layers * width,
            row_bytes=fixed,
        )
    key, value = _head_widths(profile, config)
    if name == "mha":
        meaning = f"{profile.heads} heads, keys of {key} and values of {value}"
        return KVForm(name=name, meaning=meaning, elements=profile.layers * profile.heads * (key + value))
    if (found := re.fullmatch(r"gqa([1-9][0-9]{0,3})", name)) is None:
        raise ValueError(f"{name!r} is no form of attention; known are mha, gqaN (gqa8, say), mla and mla-fp8")
    heads = int(found[1])
    meaning = f"{heads} heads, keys and values of {value}"
    return KVForm(name=name, meaning=meaning, elements=profile.layers * heads * 2 * value)


def _head_widths(profile: ModelProfile, config: Mapping[str, Any]) -> tuple[int, int]:
    """Of a key and of a value, expanded."""
    if profile.kv_kind is not KVKind.MLA:
        return profile.head_dim, profile.v_head_dim
    return int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"]), int(config["v_head_dim"])


__all__ = ["LATENT_FP8_ROW", "KVForm", "compared", "own_form"]
