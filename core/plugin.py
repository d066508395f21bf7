"""What a plugin module declares: offers, each with its options model.

Imported by every plugin module at discovery, so nothing here may import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from engine.capabilities import Capabilities, Flag, KVKind, Mask, Needs, unmet
from engine.device import DeviceProfile

T = TypeVar("T")


class Options(BaseModel):
    """Base of every component's YAML section. Unknown keys are refused; the result is immutable."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def runs_anywhere(device: DeviceProfile) -> str | None:
    """The default of `Offer.available`: no objection."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer(Generic[T]):
    """One component that a plugin puts at the engine's disposal.

    `build` is the only place for heavy imports; its arguments are fixed by the extension point (see `engine.specs`).
    `available` answers None, or in one sentence why the component can't run on this device (a missing library, say).
    `rank` orders the candidates of `auto`: among those that fit, the highest is taken.
    """

    name: str
    summary: str
    build: Callable[..., T]
    api: int = 1
    options: type[Options] = Options
    capabilities: Capabilities = field(default_factory=Capabilities)
    available: Callable[[DeviceProfile], str | None] = runs_anywhere
    rank: int = 0


__all__ = ["Capabilities", "DeviceProfile", "Flag", "KVKind", "Mask", "Needs", "Offer", "Options", "unmet"]
