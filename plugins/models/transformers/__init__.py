"""Any decoder that the transformers library knows, through the engine's attention and KV cache: the fallback."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, KVKind, Options
from engine.plugins.models.transformers.profile import read_profile
from engine.specs.model import ANY_ARCHITECTURE, Model, ModelOffer, ModelProfile

if TYPE_CHECKING:
    import torch

    from engine.ops import Ops
    from engine.specs.quantization import Quantization
    from engine.specs.weight_loader import WeightSource


class TransformersOptions(Options):
    """The fallback's section."""

    trust_remote_code: bool = Field(False, description="Run the Python code that a checkpoint brings along.")


def build(
    options: TransformersOptions,
    *,
    config: Mapping[str, Any],
    profile: ModelProfile,
    weights: WeightSource,
    linears: Quantization,
    ops: Ops,
    device: torch.device,
    dtype: torch.dtype,
) -> Model:
    """Load the model. Its layers are transformers' own, so `linears` and `ops` are not used."""
    from engine.plugins.models.transformers.model import load

    return load(config, profile, weights, device=device, dtype=dtype, trust_remote_code=options.trust_remote_code)


def available(device: DeviceProfile) -> str | None:
    """Whether the library is installed."""
    return None if not device.here or find_spec("transformers") else "needs the package transformers"


@hookimpl
def models() -> list[ModelOffer]:
    """The fallback for what no other implementation names."""
    return [
        ModelOffer(
            name="transformers",
            summary="any decoder of the transformers library (slower than an implementation of its own)",
            build=build,
            options=TransformersOptions,
            capabilities=Capabilities(
                devices=frozenset({"cpu", "cuda"}),
                kv_kinds=frozenset({KVKind.GQA}),
                flags=frozenset({Flag.HIDDEN_STATES}),
            ),
            available=available,
            rank=-100,
            architectures=frozenset({ANY_ARCHITECTURE}),
            profile=read_profile,
        )
    ]
