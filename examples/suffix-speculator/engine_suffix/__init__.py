"""Suffix look-up: what followed the longest suffix of a text, earlier in it or in past outputs, is drafted again."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Offer, Options

if TYPE_CHECKING:
    from engine.specs.model import ModelProfile
    from engine.specs.speculator import Speculator


class SuffixOptions(Options):
    """The section `speculator.options`."""

    min_match: int = Field(2, ge=1, le=64, description="Fewest tokens that must agree for a draft to be made.")
    memory: int = Field(0, ge=0, le=2**24, description="Tokens of finished requests to look in too; about 1 kB each.")


def build(options: SuffixOptions, *, profile: ModelProfile, max_running: int, **context: object) -> Speculator:
    """Needs neither the model nor the number of requests."""
    from engine_suffix.speculator import SuffixSpeculator

    return SuffixSpeculator(options.min_match, options.memory)


@hookimpl
def speculators() -> list[Offer[Speculator]]:
    """One speculator."""
    return [
        Offer(
            name="automaton",
            summary="drafts what followed the longest earlier occurrence of the last tokens",
            build=build,
            options=SuffixOptions,
        )
    ]
