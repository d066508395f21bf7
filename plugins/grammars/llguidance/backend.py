"""llguidance behind the engine's contract. All of its heavy calls release the interpreter lock."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from engine.plugins.grammars.llguidance import LlguidanceOptions
from engine.plugins.grammars.llguidance.translate import translate
from engine.specs.grammar import GrammarBackend, Matcher, TokenTable
from engine.structured import Structured

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_PLACE = re.compile(r"^(at )?\d+\(\d+\): ")


class LlguidanceMatcher(Matcher):
    """Guards what the library punishes: a token that it is given but can't take would break its matcher for good. End
    tokens are kept from it altogether, since it takes them only now and then."""

    def __init__(self, matcher: LLMatcher, ends: frozenset[int], ended: bool = False) -> None:
        self._matcher, self._ends, self._ended = matcher, ends, ended

    def fill(self, mask: NDArray[np.int32]) -> None:
        if self.is_terminated() and not self._matcher.is_error():
            words = mask.view("uint32")
            words[:] = 0
            for token in self._ends:
                words[token // 32] |= 1 << token % 32
            return
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()

    def accept(self, token: int) -> bool:
        if self._ended:
            return False
        if token in self._ends:
            self._ended = self._matcher.is_accepting()
            return self._ended
        took = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return took

    def rollback(self, count: int) -> None:
        if count and self._ended:
            self._ended, count = False, count - 1
        if count:
            self._matcher.rollback(count)

    def is_terminated(self) -> bool:
        return self._ended or self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar can't be followed here: {reason(self._matcher)}")

    def fork(self) -> LlguidanceMatcher:
        return LlguidanceMatcher(self._matcher.deep_copy(), self._ends, self._ended)


class LlguidanceBackend(GrammarBackend):
    """Holds the vocabulary as a trie, which every matcher shares."""

    def __init__(self, options: LlguidanceOptions, tokens: TokenTable) -> None:
        self._options, self._special, self._ends = options, tokens.special, frozenset(tokens.ends)
        self._tokenizer = LLTokenizer(_Vocabulary(tokens), n_vocab=len(tokens.tokens), eos_token=list(tokens.ends))
        self._limits = LLParserLimits(
            initial_lexer_fuel=options.compile_fuel,
            step_lexer_fuel=options.step_fuel,
            max_lexer_states=options.max_states,
            verbose_errors=False,
        )

    def compile(self, structured: Structured) -> LlguidanceMatcher:
        grammar = translate(structured, self._options, self._special)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ValueError(reason(matcher))
        return LlguidanceMatcher(matcher, self._ends)


class _Vocabulary(TokenizerWrapper):
    """What the library reads of a tokenizer."""

    def __init__(self, tokens: TokenTable) -> None:
        self.eos_token_id, self.bos_token_id = tokens.ends[0], None
        self.tokens = tokens.tokens
        self.special_token_ids = sorted(tokens.special.values())
        self.is_tokenizer_wrapper = True
        self._encode = tokens.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))


def reason(matcher: LLMatcher) -> str:
    """The library's complaint as half a sentence: without the place, which lies in our translation, and the excerpt."""
    lines = [line.strip() for line in matcher.get_error().splitlines()]
    errors = [line for line in lines if line.startswith("error: ")]  # of the regex parser, at the end
    first = _PLACE.sub("", lines[0]) if lines else "it can't be compiled"
    return f"{first.partition(' (in regex)')[0]}: {errors[0].removeprefix('error: ')}" if errors else first


__all__ = ["LlguidanceBackend", "LlguidanceMatcher", "reason"]
