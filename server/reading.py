"""How the answers of one request are read: which parsers, and what constrains the text they get."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from engine.model_tokenizer import load_tokenizer
from engine.parsing.choice import Parsers, choose_parsers
from engine.parsing.endings import DistinctCalls, OneCall
from engine.parsing.forced import call_list, one_call
from engine.parsing.program import ProgramParser
from engine.registry import Registry
from engine.sampling_params import SamplingParams
from engine.server.events import AnswerReader
from engine.server.tools import ToolUse
from engine.specs.reasoning_parser import ReasoningParser
from engine.specs.tool_parser import ToolParser

if TYPE_CHECKING:
    from engine.server.state import ServerState
    from engine.tokenizer import Tokenizer

log = logging.getLogger(__name__)


def load_texts(state: ServerState, registry: Registry, path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`; the parsers that fit what it writes are put into the state.

    Raises:
        EngineError: the files can't be read, or a parser that is named can't be had.
    """
    tokenizer = load_tokenizer(state.config, registry, path)
    model = tokenizer.model_text(state.config.model.chat_template)
    state.parsers = choose_parsers(state.config, registry, model)
    for picked in state.parsers.picked:
        log.info("%s: %s (%s)", picked.part, picked.name, picked.why)
    return tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """Makes the parsers of each choice. Without arguments all text is content."""

    parsers: Parsers = field(default_factory=Parsers)
    tools: ToolUse = field(default_factory=ToolUse)
    prompt: str = ""
    begun: str = ""  # the end of the prompt, if that is text of the answer already
    show_reasoning: bool = True
    constraints: bool = True  # whether the engine has a grammar component

    def constrained(self, params: SamplingParams) -> SamplingParams:
        """The parameters with what makes forced or strict calls come out right.

        Where the prompt has opened the thoughts, every constraint begins behind them.
        """
        structured = params.structured
        if self.tools.constrained or (self.constraints and structured is None):
            structured = self.tools.structured(self.parsers.tools)
        if structured is None:
            return params
        thoughts = self.thoughts()
        if thoughts is not None and thoughts.thinking and self.parsers.reasoning is not None and not structured.after:
            structured = msgspec.structs.replace(structured, after=self.parsers.reasoning.end)
        return msgspec.structs.replace(params, structured=structured)

    def kept_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that a parser must see as text."""
        markers = self.parsers.reasoning.markers if self.parsers.reasoning is not None else ()
        if self.tools.active and self.parsers.tools is not None:
            markers += self.parsers.tools.markers
        return tokenizer.special_among(markers)

    def thoughts(self) -> ReasoningParser | None:
        """A parser for the thoughts of one choice."""
        if self.parsers.reasoning is None:
            return None
        parser = self.parsers.reasoning.parser(self.prompt.removesuffix(self.begun))
        parser.feed(self.begun)
        return parser

    def reader(self) -> AnswerReader:
        """A reader for the events of one choice."""
        return AnswerReader(
            self._tool_parser(),
            forced=self.tools.forced is not None,
            show_reasoning=self.show_reasoning,
        )

    def _tool_parser(self) -> ToolParser | None:
        if self.tools.forced is not None:
            return ProgramParser(one_call(self.tools.forced))
        if self.tools.required:
            return DistinctCalls(ProgramParser(call_list()))
        if not self.tools.active or self.parsers.tools is None:
            return None
        parser = self.parsers.tools.parser(self.tools.functions)
        return parser if self.tools.parallel else OneCall(parser)


PLAIN: Final = Reading()
"""All text is content."""

__all__ = ["PLAIN", "Reading", "load_texts"]
