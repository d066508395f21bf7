"""Drafting by a smaller model of the same vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, Offer, Options

if TYPE_CHECKING:
    from engine.specs.model import ModelProfile
    from engine.specs.speculator import ResidentSpeculator


class DraftModelOptions(Options):
    """Which model drafts."""

    source: str = Field(description="SCHEME:REST as in model.source, such as path:DIR or hf:ORG/NAME.")


def build(options: DraftModelOptions, *, profile: ModelProfile, max_running: int) -> ResidentSpeculator:
    """Make the speculator; it finds its model in `plan`."""
    from engine.plugins.speculators.draft_model.resident import DraftModel

    return DraftModel(options.source)


@hookimpl
def speculators() -> list[Offer[ResidentSpeculator]]:
    """The one offer of this module."""
    return [
        Offer(
            name="draft_model",
            summary="a smaller model of the same vocabulary drafts; any model that the engine can serve",
            build=build,
            options=DraftModelOptions,
            capabilities=Capabilities(flags=frozenset({Flag.GRAPH_SAFE})),
        )
    ]


__all__ = ["DraftModelOptions", "build", "speculators"]
