"""The prediction layer that a checkpoint carries for its own tokens after next (DeepSeek's multi-token prediction)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Flag, Needs, Offer, Options

if TYPE_CHECKING:
    from engine.specs.model import ModelProfile
    from engine.specs.speculator import ResidentSpeculator


def build(options: Options, *, profile: ModelProfile, max_running: int) -> ResidentSpeculator:
    """Make the speculator; it learns of its target in `plan`."""
    from engine.plugins.speculators.mtp.resident import MtpSpeculator

    return MtpSpeculator()


@hookimpl
def speculators() -> list[Offer[ResidentSpeculator]]:
    """The one offer of this module."""
    return [
        Offer(
            name="mtp",
            summary="the checkpoint's own prediction layer (DeepSeek V3 and R1); needs no other file",
            build=build,
            requires={"models": Needs(flags=frozenset({Flag.HIDDEN_STATES}))},
        )
    ]


__all__ = ["build", "speculators"]
