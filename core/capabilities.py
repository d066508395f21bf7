"""The vocabulary in which components say what they can do and what they need.

One vocabulary for every extension point: `Capabilities` is what an offer declares, `Needs` is what the model, the
device and the other parts ask for. `unmet` compares the two and `disjoint` compares two offers; nothing else does. It
knows no component.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from typing import Final


class KVKind(StrEnum):
    """How one token's keys and values are kept."""

    GQA = "gqa"  # K and V per KV head
    MLA = "mla"  # one latent row that serves as both


class Layout(StrEnum):
    """What is in a page of KV. Whoever only moves pages takes any of them."""

    SPLIT = "split"  # a part for keys and one for values; the order within is the backend's
    LATENT = "latent"  # one part of latent rows
    PACKED = "packed"  # quantized: bytes in a format of the backend's own


class Mask(StrEnum):
    """Which earlier positions a query may see."""

    CAUSAL = "causal"
    SLIDING_WINDOW = "sliding_window"
    TREE = "tree"  # of new tokens
    TREE_LEVELS = "tree_levels"  # a tree, some of whose nodes were stored by earlier steps


class Flag(StrEnum):
    """Properties that are either there or not."""

    GRAPH_SAFE = "graph_safe"  # may run inside a captured CUDA graph
    HIDDEN_STATES = "hidden_states"  # model: shows the state that enters each layer to who taps it, and embeds tokens
    LINEARS = "linears"  # model: takes its linear layers from the quantization
    SOFTCAP = "softcap"  # attention: logit soft-capping
    PACKED_ROWS = "packed_rows"  # attention: keeps latent rows in 8 bits
    PACKED_HEADS = "packed_heads"  # attention: keeps keys and values in 8 bits
    PREFIX_REUSE = "prefix_reuse"  # KV cache: pages of a finished request can be matched again
    PRODUCER = "producer"  # KV connector: publishes KV
    CONSUMER = "consumer"  # KV connector: fetches KV
    TREE_DRAFTS = "tree_drafts"  # speculator: proposes trees
    DRAFT_PROBS = "draft_probs"  # speculator: samples its drafts and reports their distribution
    LOSSLESS = "lossless"  # quantization: the product equals the dense one up to rounding
    FAITHFUL = "faithful"  # quantization: rounds no stored block further, perplexity stays within 1 %; lossless is, too


DEVICES: Final = frozenset({"cpu", "cuda"})
DTYPES: Final = frozenset({"float32", "bfloat16", "float16"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What a component declares. An empty set for a limit means 'no limit'.

    Raises:
        ValueError: a value is not of the vocabulary; the sentence says what is.
    """

    devices: frozenset[str] = frozenset()  # of DEVICES
    min_compute_capability: tuple[int, int] | None = None
    dtypes: frozenset[str] = frozenset()  # of DTYPES
    architectures: frozenset[str] = frozenset()  # weight loader: those it can read, as config.json names them
    kv_kinds: frozenset[KVKind] = frozenset()
    layouts: frozenset[Layout] = frozenset()
    page_sizes: frozenset[int] = frozenset()
    head_dims: frozenset[int] = frozenset()
    masks: frozenset[Mask] = frozenset()
    flags: frozenset[Flag] = frozenset()

    def __post_init__(self) -> None:
        if problems := list(_strangers(self)):
            raise ValueError("; ".join(problems))


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


LIMITS: Final = {
    "devices": "device",
    "dtypes": "dtype",
    "architectures": "architecture",
    "kv_kinds": "KV kind",
    "layouts": "layout",
    "page_sizes": "page size",
    "head_dims": "head size",
}
"""Fields of `Capabilities` in which two components of one engine must have a value in common -> what one is called."""

_MEMBERS: Final = {"kv_kinds": KVKind, "layouts": Layout, "masks": Mask, "flags": Flag}
_TEXTS: Final = {"devices": DEVICES, "dtypes": DTYPES}


def unmet(have: Capabilities, need: Needs) -> list[str]:
    """Reasons why `have` does not fulfil `need`; empty when it does."""
    limits: list[tuple[str, object, frozenset[object]]] = [
        ("device", need.device, frozenset(have.devices)),
        ("dtype", need.dtype, frozenset(have.dtypes)),
        ("KV kind", need.kv_kind, frozenset(have.kv_kinds)),
        ("kv_cache.page_size", need.page_size, frozenset(have.page_sizes)),
        ("head size", need.head_dim, frozenset(have.head_dims)),
    ]
    reasons = [
        f"{what} {value} is not among {listed(allowed)}"
        for what, value, allowed in limits
        if value is not None and allowed and value not in allowed
    ]
    if (floor := have.min_compute_capability) and need.device == "cuda" and (need.compute_capability or (0, 0)) < floor:
        found = _dotted(need.compute_capability) if need.compute_capability else "unknown"
        reasons.append(f"compute capability {found} is below {_dotted(floor)}")
    reasons += [f"lacks the {mask} mask" for mask in sorted(need.masks - have.masks)]
    implied = {Flag.FAITHFUL} if Flag.LOSSLESS in have.flags else set()
    reasons += [f"lacks {flag}" for flag in sorted(need.flags - have.flags - implied)]
    return reasons


def disjoint(one: Capabilities, other: Capabilities) -> list[str]:
    """Reasons why two components can't be parts of one engine: limits that have no value in common."""
    reasons = []
    for name, what in LIMITS.items():
        mine, theirs = getattr(one, name), getattr(other, name)
        if mine and theirs and not mine & theirs:
            reasons.append(f"{what} {listed(mine)} against {listed(theirs)}")
    return reasons


def listed(values: Collection[object]) -> str:
    """Values in order, runs of evenly spaced numbers as `16, 32, …, 1024`."""
    numbers = sorted(value for value in values if isinstance(value, int))
    if len(numbers) > 4 and len({after - before for before, after in pairwise(numbers)}) == 1:
        return f"{numbers[0]}, {numbers[1]}, …, {numbers[-1]}"
    return ", ".join([str(number) for number in numbers] or sorted(str(value) for value in values))


def _strangers(declared: Capabilities) -> Iterator[str]:
    """Each field whose value is not of the vocabulary, with what would be."""
    for field in fields(declared):
        value = getattr(declared, field.name)
        if field.name == "min_compute_capability":
            if value is not None and not (isinstance(value, tuple) and [type(v) for v in value] == [int, int]):
                yield f"capability {field.name} is {value!r}, expected a pair of numbers such as (9, 0)"
        elif not isinstance(value, frozenset):
            yield f"capability {field.name} is a {type(value).__name__}, expected a frozenset"
        elif odd := [v for v in value if not _known(field.name, v)]:
            known = _TEXTS.get(field.name) or _MEMBERS.get(field.name)
            number = "a non-empty text" if field.name == "architectures" else "a positive number"
            words = f"one of {', '.join(sorted(map(str, known)))}" if known else number
            yield f"capability {field.name} has {odd[0]!r}, which is not of the vocabulary; expected {words}"


def _known(name: str, value: object) -> bool:
    if name in _MEMBERS:
        return isinstance(value, _MEMBERS[name])
    if name in _TEXTS:
        return value in _TEXTS[name]
    if name == "architectures":
        return isinstance(value, str) and value != ""
    return type(value) is int and value > 0


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


__all__ = [
    "DEVICES",
    "DTYPES",
    "LIMITS",
    "Capabilities",
    "Flag",
    "KVKind",
    "Layout",
    "Mask",
    "Needs",
    "disjoint",
    "listed",
    "unmet",
]
