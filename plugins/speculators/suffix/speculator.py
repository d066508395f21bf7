"""Drafts by vote: every earlier occurrence of the text's end says how it went on, the longer it agrees the louder.

After the idea of suffix decoding (G. Oliaro et al., 2024, arXiv 2411.04975), with an index of n-grams in place of a
suffix tree: a token costs a dictionary entry, and a look-up a bounded number of comparisons.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Final

from engine.plugins.speculators.suffix import SuffixOptions
from engine.plugins.speculators.suffix.text import Text
from engine.specs.speculator import Draft, DraftContext, Speculator

_LOUDER: Final = 1.5
"""How much more a vote weighs for each further token that agrees."""

_BREAK: Final = -1
"""Stands between past outputs; no token, so nothing matches across it."""

Voter = tuple[list[int], int, float]
"""The tokens of a text, where it goes on, and how much its vote weighs."""


class SuffixSpeculator(Speculator):
    """Keeps a text per request, and two halves of what past requests were answered, the newer last."""

    def __init__(self, options: SuffixOptions) -> None:
        self._options = options
        self._requests: dict[str, tuple[Text, int]] = {}  # and the length of the prompt
        self._past = [self._text()]

    def propose(self, contexts: Sequence[DraftContext]) -> Sequence[Draft]:
        """See `Speculator.propose`."""
        return [self._draft(context) for context in contexts]

    def forget(self, request_id: str) -> None:
        """Remember what the request was answered, as far as memory goes."""
        own, prompt_len = self._requests.pop(request_id, (None, 0))
        if own is None or not self._options.memory:
            return
        for token in [*own.tokens[prompt_len:], _BREAK]:
            self._past[-1].append(token)
        if len(self._past[-1].tokens) > self._options.memory // 2:
            self._past = [self._past[-1], self._text()]

    def _text(self) -> Text:
        return Text(self._options.min_match, self._options.max_match)

    def _draft(self, context: DraftContext) -> Draft:
        own = self._learn(context)
        found = [(text.tokens, at) for text in (own, *self._past) for at in text.occurrences(own.tokens)]
        if not found:
            return Draft()
        agreed = max(at.agrees for _, at in found)
        most = min(context.max_tokens, max(1, int(self._options.factor * agreed)))
        voters = [(tokens, at.after, _LOUDER ** (at.agrees - agreed)) for tokens, at in found]
        return Draft(list(self._continuation(voters, most)))

    def _learn(self, context: DraftContext) -> Text:
        """The request's text, grown by what is new."""
        own, prompt_len = self._requests.get(context.request_id, (self._text(), context.prompt_len))
        if len(own.tokens) > len(context.tokens):
            own, prompt_len = self._text(), context.prompt_len  # another request under the same name
        self._requests[context.request_id] = own, prompt_len
        for at in range(len(own.tokens), len(context.tokens)):
            own.append(context.tokens[at])
        return own

    def _continuation(self, voters: Sequence[Voter], most: int) -> Iterator[int]:
        """The token with most votes, and on with those who named it, while it is likely enough to be kept."""
        chance = 1.0
        for step in range(most):
            votes: defaultdict[int, float] = defaultdict(float)
            for tokens, after, weight in voters:
                if after + step < len(tokens) and tokens[after + step] != _BREAK:
                    votes[tokens[after + step]] += weight
            if not votes:
                return
            token = max(votes, key=lambda named: votes[named])
            chance *= votes[token] / sum(votes.values())
            if chance < self._options.min_chance:
                return
            yield token
            voters = [v for v in voters if v[1] + step < len(v[0]) and v[0][v[1] + step] == token]


__all__ = ["SuffixSpeculator"]
