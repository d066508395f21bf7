"""What a plugin module declares: offers, each with its options model.

Imported by every plugin module at discovery, so nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from engine.capabilities import Capabilities, Flag, KVKind, Layout, Mask, Needs, unmet
from engine.device import DeviceProfile

T = TypeVar("T")


class Options(BaseModel):
    """Base of every component's YAML section. Unknown keys are refused; the result is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Inner(Options):
    """The component that another one of the same extension point wraps, named like any other."""

    use: str = Field(default="auto", description="Name of an installed component of the same kind, or auto.")
    options: dict[str, Any] = Field(default_factory=dict, description="The component's own section.")


def _named(value: Any) -> Any:
    return {"use": value} if isinstance(value, str) else value


class WrapperOptions(Options):
    """Base of the options of a component that wraps another (`Offer.wraps`)."""

    inner: Annotated[Inner, BeforeValidator(_named)] = Field(default=Inner(), description="What is wrapped.")


def runs_anywhere(device: DeviceProfile) -> str | None:
    """The default of `Offer.available`: no objection."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Generic[T]):
    """One component that a plugin puts at the engine's disposal.

    `build` is the only place for heavy imports; its arguments are fixed by the extension point (see `engine.specs`).
    `available` answers None, or in one sentence why the component can't run on this device (a missing library, say);
    for a device that is not `here` it answers from the profile alone, since nobody can ask that machine's software.
    `requires` maps another extension point's hook to what this component asks of the one chosen there.
    `wraps` says that the component stands around another of its extension point: its options have a field `inner`
    (`WrapperOptions`) that names it, `build` gets it built as `inner`, and the inner one's capabilities count. It is
    taken only where the configuration names it.
    `rank` orders the candidates of `auto`: among those that fit, the highest is taken.
    `efficiency` maps a kind of device to the share (0..1) of its memory's bandwidth that the component reached when its
    author measured it in decoding; `engine plugins explain` divides by it, and tells the device's limit without it.
    """

    name: str
    summary: str
    build: Callable[..., T]
    api: int = 1
    options: type[Options] = Options
    capabilities: Capabilities = field(default_factory=Capabilities)
    available: Callable[[DeviceProfile], str | None] = runs_anywhere
    requires: Mapping[str, Needs] = field(default_factory=dict, hash=False)
    wraps: bool = False
    rank: int = 0
    efficiency: Mapping[str, float] = field(default_factory=dict, hash=False)


__all__ = [
    "Capabilities",
    "DeviceProfile",
    "Flag",
    "Inner",
    "KVKind",
    "Layout",
    "Mask",
    "Needs",
    "Offer",
    "Options",
    "WrapperOptions",
    "unmet",
]
