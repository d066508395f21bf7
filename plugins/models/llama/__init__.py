"""The Llama family: Llama, SmolLM2, Mistral, Qwen2, Qwen3 and Qwen3-MoE, one decoder driven by their configs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, KVKind, Options
from engine.plugins.models.llama.shape import FAMILIES, read_profile, read_shape, weights
from engine.specs.model import Model, ModelOffer, ModelProfile

if TYPE_CHECKING:
    import torch

    from engine.ops import Ops
    from engine.specs.quantization import Quantization
    from engine.specs.weight_loader import WeightSource


def build(
    options: Options,
    *,
    config: Mapping[str, Any],
    profile: ModelProfile,
    weights: WeightSource,
    linears: Quantization,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """Load the model; `profile.max_context` may be below the model's own limit and sizes the rotary tables."""
    from engine.plugins.models.llama.decoder import load

    return load(read_shape(config), profile, weights, linears, ops, device=device, dtype=dtype)


@hookimpl
def models() -> list[ModelOffer]:
    """The family's one implementation."""
    return [
        ModelOffer(
            name="llama",
            summary="Llama, SmolLM2, Mistral, Qwen2, Qwen3 and Qwen3-MoE",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}),
                kv_kinds=frozenset({KVKind.GQA}),
                flags=frozenset({Flag.HIDDEN_STATES, Flag.LINEARS, Flag.GRAPH_SAFE}),
            ),
            architectures=frozenset(FAMILIES),
            profile=read_profile,
            weights=weights,
        )
    ]
