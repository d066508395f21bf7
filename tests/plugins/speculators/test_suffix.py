"""The suffix speculator: the suite, and what voting over earlier occurrences promises."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from pydantic import ValidationError

from engine.plugins.speculators import suffix
from engine.plugins.speculators.suffix import SuffixOptions
from engine.plugins.speculators.suffix.speculator import SuffixSpeculator
from engine.plugins.speculators.suffix.text import CANDIDATES, Text
from engine.specs.speculator import DraftContext
from engine.testing.speculator import SpeculatorConformance, streams


class TestSuffix(SpeculatorConformance):
    (offer,) = suffix.speculators()
    module = "engine.plugins.speculators.suffix"


def propose(speculator: SuffixSpeculator, tokens: Sequence[int], room: int = 8, name: str = "r") -> list[int]:
    (draft,) = speculator.propose([DraftContext(name, tokens, 1, room)])
    return list(draft.tokens)


def made(**options: object) -> SuffixSpeculator:
    return SuffixSpeculator(SuffixOptions.model_validate(options))


def test_it_goes_on_as_far_as_it_agrees() -> None:
    tokens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3]
    assert propose(made(), tokens) == [4, 5, 6]
    assert propose(made(factor=2), tokens) == [4, 5, 6, 7, 8, 9]
    assert propose(made(factor=2), tokens, room=2) == [4, 5]
    assert propose(made(min_match=4), tokens) == []


def test_the_majority_is_followed() -> None:
    says = [1, 2, 7, 7, 1, 2, 8, 8, 1, 2, 7, 9, 0, 1, 2]
    assert propose(made(), says, room=1) == [7]


def test_a_longer_agreement_outvotes_others() -> None:
    says = [5, 4, 3, 1, 2, 7, 9, 1, 2, 8, 0, 1, 2, 8, 6, 5, 4, 3, 1, 2]
    assert propose(made(), says, room=1) == [7]


def test_it_stops_where_it_would_have_to_guess() -> None:
    """Two ways to go on, of which each is as likely."""
    says = [9, 1, 2, 3, 4, 0, 1, 2, 3, 5, 8, 1, 2]
    assert propose(made(factor=4, min_chance=0.0), says, room=2) in ([3, 4], [3, 5])
    assert propose(made(factor=4, min_chance=0.6), says, room=2) == [3]


def test_occurrences_equal_a_search() -> None:
    rng = random.Random(1)
    for stream in [s for s in streams().values() if s]:
        text = Text(2, 5)
        for token in stream[:80]:
            text.append(token)
        for _ in range(20):
            end = [rng.choice(stream) for _ in range(rng.randrange(1, 8))]
            found = [(at.after, at.agrees) for at in text.occurrences(end)]
            assert found == search(text.tokens, end)[: len(found)]
            assert len(found) == min(CANDIDATES, len(search(text.tokens, end)))


def search(tokens: list[int], end: list[int]) -> list[tuple[int, int]]:
    matches = []
    for after in range(len(tokens) - 1, 1, -1):
        agrees = 0
        while agrees < min(5, after, len(end)) and tokens[after - 1 - agrees] == end[-1 - agrees]:
            agrees += 1
        if agrees >= 2:
            matches.append((after, agrees))
    return matches


def test_past_outputs_are_drafted_and_prompts_are_not() -> None:
    speculator = made(memory=100)
    speculator.propose([DraftContext("first", [1, 2, 3, 4, 5, 6], prompt_len=2, max_tokens=4)])
    speculator.forget("first")
    assert propose(speculator, [9, 3, 4], name="said") == [5, 6]
    assert propose(speculator, [9, 1, 2], name="asked") == []


def test_nothing_is_remembered_without_a_memory() -> None:
    speculator = made()
    propose(speculator, [1, 2, 3, 4, 5, 6])
    speculator.forget("r")
    assert propose(speculator, [9, 3, 4], name="other") == []


def test_memory_is_bounded() -> None:
    speculator = made(memory=1000)
    for number in range(50):
        propose(speculator, [number, *range(100)])
        speculator.forget("r")
        assert sum(len(past.tokens) for past in speculator._past) <= 1000 + 102


def test_no_draft_crosses_from_one_output_to_the_next() -> None:
    speculator = made(memory=100, factor=4)
    for name in ("a", "b"):
        propose(speculator, [9, 1, 2, 3], name=name)
        speculator.forget(name)
    assert propose(speculator, [7, 1, 2], name="c") == [3]


def test_options_that_contradict_each_other_are_refused() -> None:
    with pytest.raises(ValidationError, match="max_match 2 is below min_match 3"):
        SuffixOptions(min_match=3, max_match=2)
