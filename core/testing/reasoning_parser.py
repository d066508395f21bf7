"""Conformance of reasoning parsers: however a text is cut, it is parted at the same place and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.specs.reasoning_parser import ReasoningFormat, ReasoningParserOffer, Split
from engine.specs.tool_parser import ModelText
from engine.testing.cuts import cut_at, cuts
from engine.testing.offer import OfferConformance

PLAIN = ("", " ", "Hello, world.", "\n It is 20 °C 😀.\n\n", "a < b and c > d", "[x] <y", '{"a": 1}')
"""Answers without thoughts."""


class Example(NamedTuple):
    """An answer to a prompt, parted."""

    prompt: str
    text: str
    reasoning: str
    content: str


def parted(form: ReasoningFormat, prompt: str, pieces: Iterable[str]) -> Split:
    """Both sides of a whole answer."""
    parser = form.parser(prompt)
    splits = [*(parser.feed(piece) for piece in pieces), parser.finish()]
    return Split("".join(s.reasoning for s in splits), "".join(s.content for s in splits))


class ReasoningParserConformance(OfferConformance):
    """Subclasses set `offer` and `module`, and should bring `examples` of the format."""

    offer: ClassVar[ReasoningParserOffer]
    examples: ClassVar[Sequence[Example]] = ()

    def form(self) -> ReasoningFormat:
        """The format with the options of the suite."""
        form = self.offer.build(self.options())
        assert isinstance(form, ReasoningFormat)
        return form

    def test_examples(self) -> None:
        """Where the texts are parted."""
        for example in self.examples:
            assert parted(self.form(), example.prompt, [example.text]) == Split(example.reasoning, example.content)

    @pytest.mark.parametrize("text", PLAIN)
    def test_other_text_is_content_to_the_letter(self, text: str) -> None:
        """Where nothing opens the thoughts; or thoughts, where the format always begins with them."""
        form = self.form()
        if form.parser("").thinking:
            assert parted(form, "", [text]) == Split(text.strip(), "")
        else:
            assert parted(form, "", [text]) == Split("", text)

    def test_a_cut_changes_nothing(self) -> None:
        """Every cut in two, every character by itself, random cuts."""
        form = self.form()
        for prompt, text, *_ in [*self.examples, *(Example("", text, "", "") for text in PLAIN)]:
            whole = parted(form, prompt, [text])
            for pieces in cuts(text):
                assert parted(form, prompt, pieces) == whole, pieces

    def test_random_text(self) -> None:
        """Markers, words and spaces in any order."""
        form = self.form()
        pieces = ["a", "b c", " ", "\n", "<", "[", "é😀", *form.markers, *(marker[:-1] for marker in form.markers)]
        texts = st.lists(st.sampled_from(pieces), max_size=10).map("".join)

        @settings(max_examples=60, deadline=None, database=None, suppress_health_check=list(HealthCheck))
        @given(st.sampled_from(["", *form.markers]), texts, st.lists(st.integers(0, 60), max_size=6))
        def check(prompt: str, text: str, places: list[int]) -> None:
            whole = parted(form, prompt, [text])
            assert parted(form, prompt, cut_at(text, [min(p, len(text)) for p in places])) == whole
            assert parted(form, prompt, text) == whole
            words = "".join(text.split())
            assert len("".join(whole.reasoning.split()) + "".join(whole.content.split())) >= len(words) - sum(
                map(len, form.markers)
            )

        check()

    def test_content_is_not_held_back(self) -> None:
        """Behind the thoughts, text passes at once."""
        parser = self.form().parser("")
        text = f"{''.join(self.form().markers)}Done. " if not parser.thinking else f"x{self.form().end}Done. "
        assert "".join(parser.feed(char).content for char in text) == "Done. "

    def test_thinking_ends_with_the_end(self) -> None:
        """The state that tokens are counted by."""
        form = self.form()
        parser = form.parser(form.markers[0])
        assert parser.thinking
        parser.feed("Hm.")
        assert parser.thinking
        parser.feed(form.end)
        assert not parser.thinking

    def test_a_model_without_any_sign_is_not_recognized(self) -> None:
        """Or else `auto` would read thoughts into its text."""
        assert self.offer.recognizes(ModelText(chat_template="{{ messages }}", added_tokens=frozenset({"<s>"}))) is None


__all__ = ["PLAIN", "Example", "ReasoningParserConformance", "parted"]
