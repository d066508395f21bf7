"""Shapes to try attention backends with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.capabilities import KVKind
from engine.specs.attention import AttentionShape


def gqa(heads: int = 4, kv_heads: int = 2, head_dim: int = 64, **changes: Any) -> AttentionShape:
    """A shape with K and V per KV head, float32 and one full layer unless changed."""
    shape = AttentionShape(
        kind=KVKind.GQA,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        scale=head_dim**-0.5,
        windows=(None,),
        softcap=None,
        dtype="float32",
    )
    return replace(shape, **changes)


def mla(heads: int = 4, head_dim: int = 576, v_head_dim: int = 512, **changes: Any) -> AttentionShape:
    """A shape with one latent row per token."""
    return gqa(heads, 1, head_dim, **{"kind": KVKind.MLA, "v_head_dim": v_head_dim, "scale": 192**-0.5} | changes)


def latent(heads: int = 4, head_dim: int = 96, v_head_dim: int = 64, **changes: Any) -> AttentionShape:
    """The same, with rows that are worth expanding from 77 new tokens on."""
    return mla(heads, head_dim, v_head_dim, **{"expanded": (head_dim - v_head_dim + 16, 32)} | changes)


__all__ = ["gqa", "latent", "mla"]
