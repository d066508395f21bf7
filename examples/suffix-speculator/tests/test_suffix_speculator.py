"""The speculator is held to its contract, and its automaton to a search through the text."""

import random

import engine_suffix
from engine_suffix.automaton import SuffixAutomaton
from engine_suffix.speculator import SuffixSpeculator

from engine.specs.speculator import DraftContext
from engine.testing.speculator import SpeculatorConformance, streams


class TestSuffix(SpeculatorConformance):
    (offer,) = engine_suffix.speculators()
    module = "engine_suffix"


def search(text: list[int], suffix_of: list[int]) -> tuple[int, int]:
    """Length of the longest suffix of `suffix_of` that `text` has, and where its first occurrence ends."""
    for length in range(len(suffix_of), 0, -1):
        wanted = suffix_of[-length:]
        for end in range(length, len(text) + 1):
            if text[end - length : end] == wanted:
                return length, end
    return 0, 0


def test_the_automaton_finds_what_a_search_finds() -> None:
    rng = random.Random(1)
    for stream in [s for s in streams().values() if s]:
        text = stream[:60]
        automaton = SuffixAutomaton()
        for at, token in enumerate(text):
            automaton.append(token)
            length, end = search(text[:at], text[: at + 1])
            assert automaton.recurrence() == (length, end)
        for _ in range(20):
            other = [rng.choice(text) for _ in range(rng.randrange(12))]
            assert automaton.find(other) == search(text, other)


def test_past_outputs_are_drafted_and_prompts_are_not() -> None:
    speculator = SuffixSpeculator(min_match=2, memory=100)
    speculator.propose([DraftContext("first", [1, 2, 3, 4, 5, 6], prompt_len=2, max_tokens=4)])
    speculator.forget("first")
    drafts = speculator.propose(
        [DraftContext("said", [9, 3, 4], prompt_len=1, max_tokens=4), DraftContext("asked", [9, 1, 2], 1, 4)]
    )
    assert [list(draft.tokens) for draft in drafts] == [[5, 6], []]


def test_memory_is_bounded() -> None:
    speculator = SuffixSpeculator(min_match=2, memory=1000)
    for number in range(50):
        speculator.propose([DraftContext("r", [number, *range(100)], prompt_len=1, max_tokens=4)])
        speculator.forget("r")
        assert sum(len(past.tokens) for past in speculator._past) <= 1000 + 101
