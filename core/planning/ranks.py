"""Whether a model divides among ranks, and what each of them would hold.

Arithmetic only: it tells which splits are possible on a kind of device, whatever executors are installed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.capabilities import KVKind
from engine.planning.kv import KVForm, own_form
from engine.planning.weights import WeightGroup, rank_bytes
from engine.specs.model import ModelProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFit:
    """One number of equal devices; experts are spread over all of them, the rest is split by tensor."""

    ranks: int
    weight_bytes: int  # on the fullest rank
    kv_bytes_per_token: int  # on each rank
    problems: tuple[str, ...]  # why the model can't be divided so; empty when it can
    requests: int  # of the planned context that fit beside the weights; 0 when not even one does


def rank_fits(
    profile: ModelProfile,
    config: Mapping[str, Any],
    groups: Sequence[WeightGroup],
    *,
    kv_itemsize: int,
    memory_bytes: int,
    context: int,
    form: KVForm | None = None,
    counts: Sequence[int] = (1, 2, 4, 8, 16),
) -> tuple[RankFit, ...]:
    """How the model divides among each of `counts` devices of `memory_bytes`; `form` is its own if unset."""
    kv = (form or own_form(profile)).bytes_per_token(profile.layers, kv_itemsize)
    return tuple(
        _fit(profile, config, groups, kv=kv, memory=memory_bytes, context=context, ranks=ranks) for ranks in counts
    )


def _fit(
    profile: ModelProfile,
    config: Mapping[str, Any],
    groups: Sequence[WeightGroup],
    *,
    kv: int,
    memory: int,
    context: int,
    ranks: int,
) -> RankFit:
    held, per_token = rank_bytes(groups, ranks, ranks), _kv_bytes(profile, kv, ranks)
    problems = tuple(_problems(profile, config, ranks))
    room = 0 if problems else max(0, memory - held)
    return RankFit(
        ranks=ranks,
        weight_bytes=held,
        kv_bytes_per_token=per_token,
        problems=problems,
        requests=room // (per_token * context),
    )


def _kv_bytes(profile: ModelProfile, kv: int, ranks: int) -> int:
    """Heads are divided, and kept twice where there are fewer heads than ranks; a latent row is kept by every rank."""
    heads = 1 if profile.kv_kind is KVKind.MLA else -(-profile.kv_heads // ranks)
    return heads * (kv // profile.kv_heads)


def _problems(profile: ModelProfile, config: Mapping[str, Any], ranks: int) -> list[str]:
    """The numbers that `ranks` does not divide."""
    experts = config.get("n_routed_experts") or config.get("num_experts") or config.get("num_local_experts")
    divided = [
        ("num_attention_heads", profile.heads),
        ("intermediate_size", config.get("intermediate_size")),
        ("experts", experts),
    ]
    found = [f"{ranks} does not divide {name} {number}" for name, number in divided if number and number % ranks]
    heads = profile.kv_heads
    if profile.kv_kind is KVKind.GQA and heads % ranks and ranks % heads:
        found.append(f"{ranks} neither divides num_key_value_heads {heads} nor is a multiple of it")
    return found


__all__ = ["RankFit", "rank_fits"]
