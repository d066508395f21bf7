"""Prompt look-up: what followed the last few tokens earlier in the request is guessed to follow them again."""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

from pydantic import Field, model_validator

from engine.hooks import hookimpl
from engine.plugin import Offer, Options

if TYPE_CHECKING:
    from engine.specs.model import ModelProfile
    from engine.specs.speculator import Speculator


class NgramOptions(Options):
    """How much of the end of a request must have occurred before."""

    min_match: int = Field(2, ge=1, le=16, description="Fewest tokens that must agree for a draft to be made.")
    max_match: int = Field(4, ge=1, le=64, description="Tokens beyond which a longer agreement counts no more.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_match < self.min_match:
            raise ValueError(
                f"max_match {self.max_match} is below min_match {self.min_match}; raise it or lower the other"
            )
        return self


def build(options: NgramOptions, *, profile: ModelProfile, max_running: int) -> Speculator:
    """Make the speculator; it needs neither the model nor the batch size."""
    from engine.plugins.speculators.ngram.lookup import NgramSpeculator

    return NgramSpeculator(options.min_match, options.max_match)


@hookimpl
def speculators() -> list[Offer[Speculator]]:
    """The one offer of this module."""
    return [
        Offer(
            name="ngram",
            summary="drafts what followed the same tokens earlier in the request; needs no weights",
            build=build,
            options=NgramOptions,
        )
    ]


__all__ = ["NgramOptions", "build", "speculators"]
