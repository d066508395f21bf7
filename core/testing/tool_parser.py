"""Conformance of tool parsers: however a text is cut, it says the same, and nothing of it is lost."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.parsing.calls import joined
from engine.specs.tool_parser import (
    Content,
    ModelText,
    ToolArguments,
    ToolBegin,
    ToolEnd,
    ToolEvent,
    ToolFormat,
    ToolParserOffer,
)
from engine.testing.cuts import cut_at, cuts
from engine.testing.offer import OfferConformance

FUNCTIONS = frozenset({"get_weather", "f", "g"})
"""What the model of the suite was offered."""

PLAIN = (
    "",
    " ",
    "Hello, world.",
    "  It is 20 °C 😀 in München.\n\n",
    '```json\n{"name": "nobody", "arguments": {}}\n```',
    '{"name": "nobody", "arguments": {"a": 1}}',
    "[1, 2, [3]]",
    "a < b, c <tool, [x](y), <|x|>, f(a=1)",
    '\\"\\\\ {[(',
)
"""Texts without a call in any format."""

_FRAGMENTS = (
    '{"name": "f", "arguments": {"a": "}]\\"x"}}',
    '{"arguments": {"b": [1]}, "name": "g"}',
    "f(a=1, b='x)')",
    *(
        "\\ud800",
        '"\\udfff"',
        '{"a": 1}',
        '{"name": "f"',
        "```json\n",
        "```",
        "text ",
        "é😀",
        "f",
        "function",
        "\n",
        " ",
    ),
    *("{", "}", "[", "]", "(", ")", '"', "\\", ",", ";", ":"),
)


class Example(NamedTuple):
    """A text of the format and what it says."""

    text: str
    content: str
    calls: Sequence[tuple[str, str]] = ()  # name and arguments of each


def events_of(form: ToolFormat, pieces: Iterable[str]) -> list[ToolEvent]:
    """All events of one answer, adjacent texts joined."""
    parser = form.parser(FUNCTIONS)
    found = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*found, *parser.finish()])


def without_ids(events: Iterable[ToolEvent]) -> list[ToolEvent]:
    """The same but for the ids of calls, which are new each time."""
    return [replace(event, id="") if isinstance(event, ToolBegin) else event for event in events]


def said(events: Iterable[ToolEvent]) -> Example:
    """The content and calls of an answer."""
    names: list[str] = []
    arguments: list[str] = []
    content = ""
    for event in events:
        match event:
            case Content(text):
                content += text
            case ToolBegin(_, _, name):
                names.append(name)
                arguments.append("")
            case ToolArguments(index, text):
                arguments[index] += text
            case ToolEnd():
                pass
    return Example("", content, list(zip(names, arguments, strict=True)))


def check_order(events: Sequence[ToolEvent]) -> None:
    """Calls come one after another: each begins once, under the next index and an id of its own, and ends once."""
    count, inside = 0, False
    for event in events:
        match event:
            case Content(text):
                assert text.encode(), "an event without text"
                assert not inside, "content within a call"
            case ToolBegin(index, _, name):
                assert (inside, index) == (False, count), events
                assert name.encode(), "a call without a name"
                inside = True
            case ToolArguments(index, text):
                assert text.encode(), "an event without text"
                assert (inside, index) == (True, count), events
            case ToolEnd(index):
                assert (inside, index) == (True, count), events
                inside, count = False, count + 1
    assert not inside, "a call that doesn't end"
    ids = [event.id for event in events if isinstance(event, ToolBegin)]
    assert len(set(ids)) == len(ids)
    assert all(ids)


class ToolParserConformance(OfferConformance):
    """Subclasses set `offer` and `module`, and should bring `examples` of the format."""

    offer: ClassVar[ToolParserOffer]
    examples: ClassVar[Sequence[Example]] = ()

    def form(self) -> ToolFormat:
        """The format with the options of the suite."""
        form = self.offer.build(self.options())
        assert isinstance(form, ToolFormat)
        return form

    def corpus(self) -> list[str]:
        """Texts of the format and others, whole and broken off."""
        texts = [*PLAIN, *(example.text for example in self.examples)]
        for marker in self.form().markers:
            texts += [marker, f"See {marker} here", f"{marker}{{", f'{marker}\n{{"name": 1}}', marker[:-1] + "x"]
        return texts

    def test_examples(self) -> None:
        """What the texts say."""
        for example in self.examples:
            found = said(events_of(self.form(), [example.text]))
            assert (found.content, found.calls) == (example.content, list(example.calls)), example.text

    @pytest.mark.parametrize("text", PLAIN)
    def test_other_text_is_content_to_the_letter(self, text: str) -> None:
        """White space included."""
        assert said(events_of(self.form(), [text])) == Example("", text, [])

    def test_a_cut_changes_nothing(self) -> None:
        """Every cut in two, every character by itself, random cuts."""
        form = self.form()
        for text in self.corpus():
            whole = events_of(form, [text])
            check_order(whole)
            for pieces in cuts(text):
                assert without_ids(events_of(form, pieces)) == without_ids(whole), pieces

    def test_a_text_may_end_anywhere(self) -> None:
        """What was said before stays said: calls that had begun, and all content."""
        form = self.form()
        for example in self.examples:
            for end in range(len(example.text)):
                parser = form.parser(FUNCTIONS)
                early = parser.feed(example.text[:end])
                events = joined([*early, *parser.finish()])
                check_order(events)
                if not any(isinstance(event, ToolBegin) for event in events):
                    assert said(events).content == example.text[:end]

    def test_random_text(self) -> None:
        """Markers and fragments in any order: cuts change nothing, and text without a call is content."""
        form = self.form()
        fragments = st.lists(st.sampled_from([*form.markers, *_FRAGMENTS]), max_size=12).map("".join)

        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(fragments, st.lists(st.integers(0, 200), max_size=6))
        def check(text: str, places: list[int]) -> None:
            whole = events_of(form, [text])
            check_order(whole)
            assert without_ids(events_of(form, cut_at(text, [min(p, len(text)) for p in places]))) == without_ids(whole)
            assert without_ids(events_of(form, text)) == without_ids(whole)
            if not any(isinstance(event, ToolBegin) for event in whole):
                assert said(whole).content == text

        check()

    def test_content_is_not_held_back(self) -> None:
        """After each character that is no white space and begins no marker, everything so far has been said."""
        form, text = self.form(), "The answer is: 4 apples."
        parser, shown = form.parser(FUNCTIONS), ""
        for end, char in enumerate(text, 1):
            shown += said(parser.feed(char)).content
            if not char.isspace() and not any(marker.startswith(char) for marker in form.markers):
                assert shown == text[:end]

    def test_tags_spell_calls(self) -> None:
        """What constrained decoding makes of a tag is read as the call."""
        tag = self.form().tag("get_weather")
        if tag is None:
            pytest.skip(f"{self.offer.name}: constraints can't be attached to the format")
        assert tag.begin.startswith(tag.trigger)
        arguments = json.dumps({"city": "Oslo", "note": '</"]}'})
        found = said(events_of(self.form(), [f"Well.\n{tag.begin}{arguments}{tag.end}"]))
        assert found == Example("", "Well.", [("get_weather", arguments)])

    def test_a_model_without_any_sign_is_not_recognized(self) -> None:
        """Or else `auto` would read calls into its text."""
        assert self.offer.recognizes(ModelText(chat_template="{{ messages }}", added_tokens=frozenset({"<s>"}))) is None


__all__ = ["FUNCTIONS", "PLAIN", "Example", "ToolParserConformance", "check_order", "events_of", "said", "without_ids"]
