"""Rotary position embedding as data: what a `config.json` asks for, checked without touching a tensor.

Reads both spellings: `rope_parameters` (theta inside) and the older `rope_theta` with `rope_scaling`. The tables are
made by `engine.ops.rope_table`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

DEFAULT_THETA: Final = 10000.0

_REQUIRED: Final[Mapping[str, tuple[str, ...]]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
_OPTIONAL: Final = frozenset(
    {"rope_type", "type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings"}
    | {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeSettings:
    """One rotary embedding. Fields that its kind doesn't use keep their defaults."""

    kind: str  # default, linear, dynamic, yarn, longrope or llama3
    theta: float
    dim: int  # elements of a head that rotate
    trained_context: int  # tokens the frequencies were trained for, before any stretching
    factor: float = 1.0
    attention_factor: float | None = None  # None: what the kind's paper says
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()


def read_rope(config: Mapping[str, Any], head_dim: int) -> RopeSettings:
    """What the config asks for, with heads of `head_dim` elements.

    Raises:
        ValueError: the kind or one of its fields is unknown or missing; the sentence names it.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"rope_parameters must be a mapping, not {given!r}")
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    kind = given.get("rope_type") or given.get("type") or "default"
    _check(field, kind, given)
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    max_positions = int(config.get("max_position_embeddings", 2048))
    trained = config.get("original_max_position_embeddings") or given.get("original_max_position_embeddings")
    trained = int(trained or max_positions)
    numbers = {
        name: float(given[name])
        for name in ("low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow")
        if given.get(name) is not None
    }
    return RopeSettings(
        kind=kind,
        theta=float(given.get("rope_theta") or config.get("rope_theta") or DEFAULT_THETA),
        dim=int(head_dim * share),
        trained_context=trained,
        factor=float(given.get("factor") or max_positions / trained),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        truncate=bool(given.get("truncate", True)),
        short_factor=_factors(field, given, "short_factor", int(head_dim * share) // 2),
        long_factor=_factors(field, given, "long_factor", int(head_dim * share) // 2),
        **numbers,
    )


def context_limit(config: Mapping[str, Any], rope: RopeSettings) -> int:
    """Tokens that a model with these frequencies can hold.

    `linear` and `yarn` stretch the trained context by their factor where the config does not say so already. `dynamic`
    frequencies move with the length of the text beyond the trained context, which keys in a cache can't follow, so
    it stops there.
    """
    limit = int(config.get("max_position_embeddings", 2048))
    if rope.kind in ("linear", "yarn"):
        return max(limit, int(rope.trained_context * rope.factor))
    return limit


def _check(field: str, kind: Any, given: Mapping[str, Any]) -> None:
    if any(isinstance(value, Mapping) for value in given.values()):
        raise ValueError(f"{field} differs by layer type, which this implementation lacks")
    if kind not in _REQUIRED:
        raise ValueError(f"{field}.rope_type {kind!r} is unknown; known are {', '.join(_REQUIRED)}")
    for name in _REQUIRED[kind]:
        if given.get(name) is None:
            raise ValueError(f"{field}.{name} is missing, which rope_type {kind!r} needs")
    known = _OPTIONAL | set(_REQUIRED[kind])
    if kind == "default":  # leftovers of another kind are harmless there, other mathematics is not
        known |= {name for names in _REQUIRED.values() for name in names}
    if unknown := sorted(set(given) - known):
        raise ValueError(f"{field}.{unknown[0]} is not implemented for rope_type {kind!r}")


def _factors(field: str, given: Mapping[str, Any], name: str, expected: int) -> tuple[float, ...]:
    factors = tuple(float(value) for value in given.get(name) or ())
    if factors and len(factors) != expected:
        raise ValueError(f"{field}.{name} has {len(factors)} entries; the rotated part of a head asks for {expected}")
    return factors


__all__ = ["DEFAULT_THETA", "RopeSettings", "context_limit", "read_rope"]
