"""The weights of a model by what they are for, in elements and bytes, and how they divide among ranks.

Works on the names and shapes that a model implementation lists (`ModelOffer.weights`), in the Hugging Face spelling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Literal

Split = Literal["rows", "columns", "experts", "copy"]
"""How tensor- or expert-parallel ranks share a weight: its output rows, its input columns, its experts, or not."""

_RULES: Final[tuple[tuple[str, str, Split], ...]] = (
    (r"mlp\.experts\.", "routed experts", "experts"),
    (r"shared_expert.*\.(gate|up)_proj\.", "shared experts", "rows"),
    (r"shared_expert.*\.down_proj\.", "shared experts", "columns"),
    (r"mlp\.gate\.|block_sparse_moe\.gate\.", "routers", "copy"),
    (r"mlp\.down_proj\.", "feed-forward", "columns"),
    (r"mlp\.", "feed-forward", "rows"),
    (r"self_attn\.o_proj\.", "attention", "columns"),
    (r"self_attn\.(q_a_proj|kv_a_proj_with_mqa)\.", "attention", "copy"),
    (r"self_attn\..*_proj\.", "attention", "rows"),
    (r"embed_tokens\.", "embedding", "rows"),
    (r"lm_head\.", "output layer", "rows"),
    (r".*", "norms and the rest", "copy"),
)
"""The first pattern that is found in a name decides. Splits are Megatron's (arXiv 1909.08053)."""


_NOT_LINEAR: Final = frozenset({"embedding", "routers", "norms and the rest"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How weights are kept in memory."""

    dtype_bytes: int  # of what is not quantized
    matrix_bytes: float  # per element of a linear layer, scales included
    copies_tied_head: bool = False  # an output layer that is tied to the embedding is kept a second time
    plain: frozenset[str] = _NOT_LINEAR  # purposes whose weights stay in the dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGroup:
    """Weights of one purpose."""

    name: str
    elements: int
    bytes: int
    by_split: Mapping[Split, int]  # bytes


def group_weights(shapes: Mapping[str, tuple[int, ...]], kept: Kept) -> tuple[WeightGroup, ...]:
    """The groups of a model, in the order in which they first occur."""
    elements: dict[str, int] = {}
    by_split: dict[str, dict[Split, float]] = {}
    for name, shape in shapes.items():
        group, split = _rule(name)
        size = prod(shape)
        elements[group] = elements.get(group, 0) + size
        splits = by_split.setdefault(group, {})
        splits[split] = splits.get(split, 0.0) + size * _per_element(group, shape, kept)
    if kept.copies_tied_head and "output layer" not in elements and "embedding" in elements:
        elements["output layer"] = 0
        by_split["output layer"] = {"rows": elements["embedding"] * kept.matrix_bytes}
    return tuple(
        WeightGroup(
            name=name,
            elements=count,
            bytes=round(sum(by_split[name].values())),
            by_split={split: round(size) for split, size in by_split[name].items()},
        )
        for name, count in elements.items()
    )


def stored(config: Mapping[str, Any]) -> Kept | None:
    """How a checkpoint keeps its matrices where it is quantized in FP8 blocks with a float32 scale each
    (`quantization_config` of DeepSeek-V3), else None. Its output layer is left in bfloat16, as its embedding is."""
    packed = config.get("quantization_config")
    if not isinstance(packed, Mapping) or packed.get("quant_method") != "fp8":
        return None
    block = packed.get("weight_block_size")
    matrix_bytes = 1.0 + (4.0 / prod(block) if block else 0.0)
    return Kept(dtype_bytes=2, matrix_bytes=matrix_bytes, plain=_NOT_LINEAR | {"output layer"})


def rank_bytes(groups: Iterable[WeightGroup], tensor_parallel: int, expert_parallel: int) -> int:
    """Bytes that the fullest rank holds."""
    ranks: Mapping[Split, int] = {
        "rows": tensor_parallel,
        "columns": tensor_parallel,
        "experts": expert_parallel,
        "copy": 1,
    }
    return sum(-(-size // ranks[split]) for group in groups for split, size in group.by_split.items())


def _rule(name: str) -> tuple[str, Split]:
    return next((group, split) for pattern, group, split in _RULES if re.search(pattern, name))


def _per_element(group: str, shape: tuple[int, ...], kept: Kept) -> float:
    """Only matrices of linear layers are quantized: no vector, no embedding and no router."""
    return kept.matrix_bytes if len(shape) >= 2 and group not in kept.plain else float(kept.dtype_bytes)


__all__ = ["Kept", "Split", "WeightGroup", "group_weights", "rank_bytes", "stored"]
