"""Fault injection around any attention backend, scripted from the configuration. For tests of an engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from engine.faults import When
from engine.hooks import hookimpl
from engine.plugin import DeviceProfile, Offer, WrapperOptions

if TYPE_CHECKING:
    from engine.specs.attention import AttentionBackend, AttentionShape


class AttentionFault(When):
    """One line of the script. An occasion is a step; those with which the engine warms up count too."""

    kind: Literal["nan", "corrupt", "delay", "raise", "kill"] = Field(
        description="nan and corrupt spoil a layer, delay waits, raise fails the step, kill ends the process."
    )
    layer: int = Field(0, ge=0, description="The layer in which it happens.")
    requests: Literal["first", "all"] = Field("first", description="Whose output nan and corrupt spoil.")
    seconds: float = Field(0.1, gt=0, description="How long delay waits.")


class FaultyOptions(WrapperOptions):
    """What is wrapped, and what goes wrong with it."""

    faults: list[AttentionFault] = Field(default_factory=list, description="The script; several may strike at once.")


def build(
    options: FaultyOptions,
    *,
    inner: AttentionBackend,
    shape: AttentionShape,
    page_size: int,
    device: DeviceProfile,
) -> AttentionBackend:
    """Wrap `inner`; raises ValueError when a fault names a layer that the model lacks."""
    from engine.plugins.attention.faulty.backend import FaultyAttention

    return FaultyAttention(inner, options.faults, layers=len(shape.windows))


@hookimpl
def attention_backends() -> list[Offer[AttentionBackend]]:
    """The wrapper."""
    return [
        Offer(
            name="faulty",
            summary="another backend with faults injected (NaN or noise at a layer, delay, failure, crash), for tests",
            build=build,
            options=FaultyOptions,
            wraps=True,
        )
    ]
