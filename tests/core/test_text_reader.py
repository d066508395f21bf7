"""The reader under all parsers: words are found wherever the text is cut, and nothing else is held back."""

from __future__ import annotations

from collections.abc import Generator

import pytest

from engine.parsing.reader import Reader
from engine.testing.cuts import cuts


def sought(words: tuple[str, ...], pieces: list[str]) -> list[str]:
    """The text and the words in it, in order; words in brackets."""
    reader, found = Reader(), [""]

    def add(text: str) -> None:
        found[-1] += text

    def program() -> Generator[None, None, None]:
        while word := (yield from reader.seek(words, add)):
            assert reader.taken() == word
            found.extend((f"[{word}]", ""))

    run = program()
    next(run, None)
    for piece in pieces:
        reader.push(piece)
        next(run, None)
    reader.end()
    assert next(run, "over") == "over"
    return [part for part in found if part]


@pytest.mark.parametrize(
    ("words", "text", "expected"),
    [
        (("<a>",), "x<a>y<a><a", ["x", "[<a>]", "y", "[<a>]", "<a"]),
        (("aab",), "aaab", ["a", "[aab]"]),
        (("abab",), "ababab", ["[abab]", "ab"]),
        (("bc", "abcd"), "abcd", ["a", "[bc]", "d"]),  # complete first
        (("bc", "abc"), "abc", ["[abc]"]),  # complete together: the longest
        (("<a>", "<b>"), "<b<a<b><a>", ["<b<a", "[<b>]", "[<a>]"]),
        (("é😀",), "é é😀", ["é ", "[é😀]"]),
    ],
)
def test_words_are_found_whatever_the_cut(words: tuple[str, ...], text: str, expected: list[str]) -> None:
    assert sought(words, [text]) == expected
    for pieces in cuts(text):
        assert sought(words, pieces) == expected, pieces


def test_only_what_may_become_a_word_is_held_back() -> None:
    reader, shown = Reader(), []
    run = reader.seek(("</think>",), shown.append)
    next(run)
    for piece, expected in (("a<", "a"), ("b", "a<b"), ("</", "a<b"), ("thin", "a<b"), ("g", "a<b</thing")):
        reader.push(piece)
        next(run)
        assert "".join(shown) == expected


def test_what_was_held_can_be_taken_back() -> None:
    reader = Reader()
    reader.push("abcd")

    def program() -> Generator[None, None, list[str]]:
        assert (yield from reader.accept("a"))
        reader.hold()
        assert (yield from reader.accept("bc"))
        reader.back()
        assert not (yield from reader.accept("x"))
        assert (yield from reader.accept("b"))
        return [reader.taken(), (yield from reader.take()), (yield from reader.take()), (yield from reader.take())]

    reader.end()
    with pytest.raises(StopIteration) as done:
        next(program())
    assert done.value.value == ["b", "c", "d", ""]
