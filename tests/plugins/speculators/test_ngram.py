"""The n-gram speculator: the suite, and what prompt look-up itself promises."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from pydantic import ValidationError

from engine.plugins.speculators import ngram
from engine.plugins.speculators.ngram.lookup import CANDIDATES, History, NgramSpeculator, continuation
from engine.specs.speculator import DraftContext
from engine.testing.speculator import SpeculatorConformance


class TestNgram(SpeculatorConformance):
    (offer,) = ngram.speculators()
    module = "engine.plugins.speculators.ngram"


class TestNgramOfOneToken(SpeculatorConformance):
    (offer,) = ngram.speculators()
    module = "engine.plugins.speculators.ngram"

    def options(self) -> ngram.NgramOptions:
        return ngram.NgramOptions(min_match=1, max_match=1)


def propose(speculator: NgramSpeculator, tokens: Sequence[int], room: int = 4) -> list[int]:
    (draft,) = speculator.propose([DraftContext("r", tokens, 1, room)])
    return list(draft.tokens)


@pytest.fixture
def speculator() -> NgramSpeculator:
    return NgramSpeculator(2, 4)


def test_continues_what_followed_before(speculator: NgramSpeculator) -> None:
    assert propose(speculator, [7, 8, 1, 2, 3, 4, 7, 8]) == [1, 2, 3, 4]


def test_needs_min_match_tokens(speculator: NgramSpeculator) -> None:
    assert propose(speculator, [8, 1, 2, 3, 9, 8]) == []


def test_latest_of_equal_matches_wins(speculator: NgramSpeculator) -> None:
    assert propose(speculator, [7, 8, 1, 7, 8, 2, 7, 8], room=1) == [2]


def test_longer_match_wins_over_a_later_one(speculator: NgramSpeculator) -> None:
    assert propose(speculator, [5, 6, 7, 8, 1, 9, 7, 8, 2, 5, 6, 7, 8], room=1) == [1]


def test_agreement_beyond_max_match_counts_no_more() -> None:
    tokens = [4, 5, 6, 1, 9, 5, 6, 2, 4, 5, 6]
    assert propose(NgramSpeculator(2, 3), tokens, room=1) == [1]
    assert propose(NgramSpeculator(2, 2), tokens, room=1) == [2]


def test_agreement_stops_at_the_first_token() -> None:
    assert propose(NgramSpeculator(2, 4), [7, 8, 1, 2, 7, 8], room=1) == [1]


def test_the_end_never_matches_itself(speculator: NgramSpeculator) -> None:
    assert propose(speculator, [1, 2, 3]) == []
    assert propose(speculator, [1, 2, 3]) == []  # nor when asked twice
    assert propose(speculator, [1, 2, 3, 2, 3], room=1) == [2]


def test_a_period_is_continued_past_the_end(speculator: NgramSpeculator) -> None:
    assert propose(speculator, [1, 2, 3, 1, 2, 3], room=8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_continuation_of_a_constant() -> None:
    assert continuation([5, 5, 5], 2, 4) == [5, 5, 5, 5]


def test_incremental_equals_from_scratch() -> None:
    rng = random.Random(1)
    history, tokens = History(2, 4), []
    for _ in range(400):
        tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        history.learn(tokens)
        afresh = History(2, 4)
        afresh.learn(tokens)
        assert history.follower(tokens) == afresh.follower(tokens)


def test_follower_equals_brute_force() -> None:
    """Where few occurrences exist, the bounded search is the exact one."""
    rng = random.Random(2)
    for _ in range(300):
        tokens = [rng.randrange(6) for _ in range(rng.randrange(1, 40))]
        matches = list(_matches(tokens))
        if len(matches) > CANDIDATES:
            continue
        history = History(2, 4)
        history.learn(tokens)
        assert history.follower(tokens) == max(matches, default=(0, None))[1]


def _matches(tokens: list[int]) -> Iterator[tuple[int, int]]:
    for at in range(2, len(tokens)):
        length = 0
        while length < min(4, at) and tokens[at - 1 - length] == tokens[-1 - length]:
            length += 1
        if length >= 2:
            yield length, at


def test_look_up_reads_only_what_is_new() -> None:
    """Amortised cost: each token is sliced into the index once, however often the request is drafted for."""

    class Counting(list[int]):
        slices = 0

        def __getitem__(self, key: object) -> object:  # type: ignore[override]
            Counting.slices += isinstance(key, slice)
            return super().__getitem__(key)  # type: ignore[call-overload]

    tokens = Counting(range(1000))
    speculator = NgramSpeculator(2, 4)
    propose(speculator, tokens)
    Counting.slices = 0
    for i in range(50):
        tokens.append(i)
        propose(speculator, tokens)
    assert Counting.slices == 2 * 50  # one n-gram indexed and one looked up per step


def test_a_request_that_shrank_is_indexed_anew(speculator: NgramSpeculator) -> None:
    propose(speculator, [1, 2, 3, 4, 5, 6, 7, 8])
    assert propose(speculator, [9, 9, 4, 9, 9], room=1) == [4]


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_match 2 is below min_match 3"):
        ngram.NgramOptions(min_match=3, max_match=2)
    with pytest.raises(ValidationError, match="min_match"):
        ngram.NgramOptions.model_validate({"min_match": 0})
