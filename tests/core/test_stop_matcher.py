from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.stop import StopMatcher

letters = st.text("ab", max_size=30)
words = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The definition: the stop string that is complete first, of several at one place the longest."""
    for end in range(1, len(text) + 1):
        found = [word for word in stops if text[:end].endswith(word)]
        if found:
            word = max(found, key=len)
            return text[: end if include else end - len(word)], word
    return text, None


@given(st.lists(letters, max_size=6), words, st.booleans())
def test_any_split_gives_what_the_whole_text_gives(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher, shown = StopMatcher(stops, include), ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == cut("".join(pieces), stops, include)


@given(st.lists(letters, max_size=6), words)
def test_only_what_may_begin_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    matcher, shown, seen = StopMatcher(stops), "", ""
    for piece in pieces:
        seen += piece
        shown += matcher.push(piece)
        if matcher.matched is not None:
            return
        held = seen[len(shown) :]
        assert seen.startswith(shown)
        assert held == "" or any(word.startswith(held) and word != held for word in stops)


def test_an_unarmed_matcher_lets_whole_stop_strings_pass() -> None:
    matcher = StopMatcher(["stop"])
    assert matcher.push("a stop ", armed=False) == "a stop "
    assert matcher.push("st", armed=False) == ""
    assert matcher.push("op!") == ""
    assert matcher.matched == "stop"


def test_what_was_passed_over_does_not_stop_later() -> None:
    matcher = StopMatcher(["aa"])
    assert matcher.push("aa", armed=False) == "a"
    assert matcher.push("b") == "ab"
    assert matcher.matched is None


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["x"])
    matcher.push("x")
    with pytest.raises(AssertionError, match="the text has ended"):
        matcher.push("more")
