"""The vocabulary in which components say what they can do and what they need.

One vocabulary for every extension point: `Capabilities` is what an offer declares, `Needs` is what the model, the
device and the other parts ask for, and `unmet` is the only place where the two are compared. It knows no component.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class KVKind(StrEnum):
    """How one token's keys and values are kept."""

    GQA = "gqa"  # K and V per KV head
    MLA = "mla"  # one latent row that serves as both


class Mask(StrEnum):
    """Which earlier positions a query may see."""

    CAUSAL = "causal"
    SLIDING_WINDOW = "sliding_window"
    TREE = "tree"


class Flag(StrEnum):
    """Properties that are either there or not."""

    GRAPH_SAFE = "graph_safe"  # may run inside a captured CUDA graph
    SOFTCAP = "softcap"  # attention: logit soft-capping
    PREFIX_REUSE = "prefix_reuse"  # KV cache: pages of a finished request can be matched again
    PRODUCER = "producer"  # KV connector: publishes KV
    CONSUMER = "consumer"  # KV connector: fetches KV
    LAYERWISE = "layerwise"  # KV connector: moves a layer while later ones are computed
    TREE_DRAFTS = "tree_drafts"  # speculator: proposes trees
    DRAFT_PROBS = "draft_probs"  # speculator: samples its drafts and reports their distribution
    LOSSLESS = "lossless"  # quantization: the product equals the dense one up to rounding


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a component declares. An empty set for a limit means 'no limit'."""

    devices: frozenset[str] = frozenset()  # "cpu", "cuda"
    min_compute_capability: tuple[int, int] | None = None
    dtypes: frozenset[str] = frozenset()  # "float32", "bfloat16", "float16"
    kv_kinds: frozenset[KVKind] = frozenset()
    page_sizes: frozenset[int] = frozenset()
    head_dims: frozenset[int] = frozenset()
    masks: frozenset[Mask] = frozenset()
    flags: frozenset[Flag] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What a composition asks of one component. None or empty means 'nothing asked'."""

    device: str | None = None
    compute_capability: tuple[int, int] | None = None
    dtype: str | None = None
    kv_kind: KVKind | None = None
    page_size: int | None = None
    head_dim: int | None = None
    masks: frozenset[Mask] = frozenset()
    flags: frozenset[Flag] = frozenset()


def unmet(have: Capabilities, need: Needs) -> list[str]:
    """Reasons why `have` does not fulfil `need`; empty when it does."""
    limits: list[tuple[str, object, frozenset[object]]] = [
        ("device", need.device, frozenset(have.devices)),
        ("dtype", need.dtype, frozenset(have.dtypes)),
        ("KV kind", need.kv_kind, frozenset(have.kv_kinds)),
        ("page size", need.page_size, frozenset(have.page_sizes)),
        ("head size", need.head_dim, frozenset(have.head_dims)),
    ]
    reasons = [
        f"{what} {value} is not among {', '.join(sorted(map(str, allowed)))}"
        for what, value, allowed in limits
        if value is not None and allowed and value not in allowed
    ]
    if (floor := have.min_compute_capability) and need.device == "cuda" and (need.compute_capability or (0, 0)) < floor:
        reasons.append(f"compute capability {need.compute_capability} is below {floor[0]}.{floor[1]}")
    reasons += [f"lacks the {mask} mask" for mask in sorted(need.masks - have.masks)]
    reasons += [f"lacks {flag}" for flag in sorted(need.flags - have.flags)]
    return reasons


__all__ = ["Capabilities", "Flag", "KVKind", "Mask", "Needs", "unmet"]
