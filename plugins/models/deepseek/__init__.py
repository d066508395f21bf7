"""DeepSeek V2, V3 and R1: multi-head latent attention over one shared row per token, and routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, KVKind, Options
from engine.plugins.models.deepseek.shape import FAMILIES, read_profile, read_shape, weights
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
    from engine.plugins.models.deepseek.decoder import load

    return load(read_shape(config), profile, weights, linears, ops, device=device, dtype=dtype)


@hookimpl
def models() -> list[ModelOffer]:
    """The family's one implementation."""
    return [
        ModelOffer(
            name="deepseek",
            summary="DeepSeek V2, V2-Lite, V3 and R1 (latent attention, routed experts)",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}),
                kv_kinds=frozenset({KVKind.MLA}),
                flags=frozenset({Flag.HIDDEN_STATES, Flag.LINEARS, Flag.GRAPH_SAFE}),
            ),
            architectures=frozenset(FAMILIES),
            profile=read_profile,
            weights=weights,
        )
    ]
