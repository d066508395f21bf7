"""One automaton for each request, and two for what past requests said. Called on the scheduler's thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from engine.specs.speculator import Draft, DraftContext, Speculator
from engine_suffix.automaton import SuffixAutomaton

REACH: Final = 64
"""Most tokens of a suffix that are looked up in past outputs."""

BREAK: Final = -1
"""Stands between past outputs; no token, so that nothing matches across it."""


class SuffixSpeculator(Speculator):
    """Drafts no more tokens than agreed before: the longer the match, the likelier it goes on."""

    def __init__(self, min_match: int, memory: int) -> None:
        self._min_match, self._memory = min_match, memory
        self._requests: dict[str, tuple[SuffixAutomaton, int]] = {}  # and the length of the prompt
        self._past = [SuffixAutomaton()]  # the newest last; at most two of half the memory each

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """See `Speculator.propose`."""
        return [self._draft(context) for context in contexts]

    def forget(self, request_id: str) -> None:
        """Remember what the request said, as far as memory goes."""
        own, prompt_len = self._requests.pop(request_id, (SuffixAutomaton(), 0))
        if self._memory:
            for token in [*own.tokens[prompt_len:], BREAK]:
                self._past[-1].append(token)
            if len(self._past[-1].tokens) > self._memory // 2:
                self._past = [self._past[-1], SuffixAutomaton()]

    def _draft(self, context: DraftContext) -> Draft:
        own, prompt_len = self._requests.get(context.request_id, (SuffixAutomaton(), context.prompt_len))
        if len(own.tokens) > len(context.tokens):
            own = SuffixAutomaton()  # another request under the same name
        self._requests[context.request_id] = own, prompt_len
        for at in range(len(own.tokens), len(context.tokens)):
            own.append(context.tokens[at])
        length, text = max(self._matches(own), key=lambda match: match[0])
        if length < self._min_match:
            return Draft()
        return Draft(text[: min(length, context.max_tokens)])

    def _matches(self, own: SuffixAutomaton) -> Iterator[tuple[int, list[int]]]:
        """How many tokens agree, and what followed them; the request itself comes first and wins a tie."""
        length, end = own.recurrence()
        yield length, own.tokens[end:]
        for past in reversed(self._past):
            length, end = past.find(own.tokens[-REACH:])
            follows = past.tokens[end : end + REACH]
            yield length, follows[: follows.index(BREAK)] if BREAK in follows else follows
