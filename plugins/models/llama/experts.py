"""How Qwen3-MoE's layers choose among experts, read from `config.json`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.checkpoint import count
from engine.routing import Routing


def read_routing(config: Mapping[str, Any]) -> Routing:
    """The rule of every layer with a router.

    Raises:
        ValueError: a number is missing or impossible; the sentence names it.
    """
    name = "num_local_experts" if "num_local_experts" in config else "num_experts"
    experts, chosen = count(config, name), count(config, "num_experts_per_tok")
    if chosen > experts:
        raise ValueError(f"num_experts_per_tok {chosen} is more than num_experts {experts}")
    normalize = bool(config.get("norm_topk_prob", False))
    return Routing(scoring="softmax", experts=experts, chosen=chosen, normalize=normalize)


def dense_layers(config: Mapping[str, Any], layers: int) -> frozenset[int]:
    """Layers without experts: those that the config lists, and all but every `decoder_sparse_step`-th."""
    step = int(config.get("decoder_sparse_step") or 1)
    listed = config.get("mlp_only_layers") or ()
    return frozenset(index for index in range(layers) if index in listed or (index + 1) % step)


__all__ = ["dense_layers", "read_routing"]
