"""Suffix decoding: what followed the end of a text before, in it or in past outputs, by how often it did."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from engine.hooks import hookimpl
from engine.plugin import Offer, Options

if TYPE_CHECKING:
    from engine.specs.model import ModelProfile
    from engine.specs.speculator import Speculator


class SuffixOptions(Options):
    """What is looked up, where, and how far a match is trusted."""

    min_match: int = Field(2, ge=1, le=16, description="Fewest tokens that must agree for a draft to be made.")
    max_match: int = Field(24, ge=1, le=256, description="Tokens beyond which a longer agreement counts no more.")
    factor: float = Field(1.0, gt=0, le=16, description="Most draft tokens per token that agrees.")
    min_chance: float = Field(
        0.1, ge=0, le=1, description="A draft ends where its estimated chance to be kept falls below this."
    )
    memory: int = Field(
        0,
        ge=0,
        le=2**24,
        description="Tokens of past outputs to look in too, about 0.3 kB each. Speed may then tell one client what "
        "another was answered.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match {self.max_match} is below min_match {self.min_match}; raise it or lower the other"
            )
        return self


def build(options: SuffixOptions, *, profile: ModelProfile, max_running: int) -> Speculator:
    """Make the speculator; it needs neither the model nor the batch size."""
    from engine.plugins.speculators.suffix.speculator import SuffixSpeculator

    return SuffixSpeculator(options)


@hookimpl
def speculators() -> list[Offer[Speculator]]:
    """The one offer of this module."""
    return [
        Offer(
            name="suffix",
            summary="drafts what most often followed the end of the text, in it or in past outputs",
            build=build,
            options=SuffixOptions,
        )
    ]


__all__ = ["SuffixOptions", "build", "speculators"]
