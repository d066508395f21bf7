"""Grammars through llguidance: an Earley parser over lexer automata that computes the mask of every token anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Offer, Options

if TYPE_CHECKING:
    from engine.specs.grammar import GrammarBackend, TokenTable


class LlguidanceOptions(Options):
    """What JSON may look like, and how much work a grammar may cause."""

    whitespace: str = Field(
        r" ?|\r?\n[ \t]{0,32}",
        description="Regex of what may stand between two tokens of JSON, unless the request says; empty for nothing. "
        "Without a bound, a model can write blanks for ever.",
    )
    lenient: bool = Field(
        False, description="Ignore schema keywords that can't be enforced, instead of refusing the request."
    )
    compile_fuel: int = Field(
        1_000_000, gt=0, description="Work for building a grammar's automata; some 50,000 units a millisecond."
    )
    step_fuel: int = Field(
        200_000, gt=0, description="Work of the lexer for one mask; some 14,000 units a millisecond."
    )
    max_states: int = Field(250_000, gt=0, description="Most lexer states of one grammar; 1 to 2 kB each.")


def build(options: LlguidanceOptions, *, tokens: TokenTable) -> GrammarBackend:
    """Make the component for a vocabulary."""
    from engine.plugins.grammars.llguidance.backend import LlguidanceBackend

    return LlguidanceBackend(options, tokens)


@hookimpl
def grammars() -> list[Offer[GrammarBackend]]:
    """The one offer of this module."""
    return [
        Offer(
            name="llguidance",
            summary="JSON schemas, regexes, choices, Lark and GBNF grammars and structural tags, without compile times",
            build=build,
            options=LlguidanceOptions,
        )
    ]


__all__ = ["LlguidanceOptions", "build", "grammars"]
