"""Tagged thoughts through the shared suite: the usual tags, Mistral's, and declared ones."""

from __future__ import annotations

import pytest

from engine.plugin import Options
from engine.plugins.reasoning_parsers import declarative, mistral, think
from engine.specs.tool_parser import ModelText
from engine.testing.reasoning_parser import Example, ReasoningParserConformance

ASK = "<|im_start|>assistant\n"


class TestThink(ReasoningParserConformance):
    (offer,) = think.reasoning_parsers()
    module = "engine.plugins.reasoning_parsers.think"
    examples = (
        Example(ASK, "<think>\nOne. Two.\n</think>\n\nThree.\n", "One. Two.", "Three.\n"),
        Example(f"{ASK}<think>\n", "One.\n</think>\n\nTwo.", "One.", "Two."),
        Example(f"{ASK}<think>\n", "<think>One.</think>Two.", "One.", "Two."),
        Example(f"{ASK}<think>\n", "It never ends", "It never ends", ""),
        Example(f"{ASK}<think>\n\n</think>\n\n", "Two.", "", "Two."),
        Example(ASK, "<think></think>Two.", "", "Two."),
        # A tag in the middle is text, and so is a second one.
        Example(ASK, "The tag <think> opens.</think>", "", "The tag <think> opens.</think>"),
        Example(ASK, "<think>a</think>b<think>c</think>d", "a", "b<think>c</think>d"),
        Example(ASK, "  <thin", "", "  <thin"),
    )


class TestThinkAlways(ReasoningParserConformance):
    """For a model whose template doesn't show that it opens the thoughts."""

    (offer,) = think.reasoning_parsers()
    module = "engine.plugins.reasoning_parsers.think"
    examples = (
        Example(ASK, "One.</think>Two.", "One.", "Two."),
        Example(f"{ASK}<think>\n\n</think>\n\n", "Two.", "", "Two."),
    )

    def options(self) -> Options:
        return think.ThinkOptions(opened="always")


class TestMistral(ReasoningParserConformance):
    (offer,) = mistral.reasoning_parsers()
    module = "engine.plugins.reasoning_parsers.mistral"
    examples = (Example("", "[THINK]One.[/THINK]Two.", "One.", "Two."),)


class TestDeclarative(ReasoningParserConformance):
    (offer,) = declarative.reasoning_parsers()
    module = "engine.plugins.reasoning_parsers.declarative"
    examples = (Example("", "Thoughts: one.\nAnswer: two.", "one.", "two."),)

    def options(self) -> Options:
        return declarative.DeclarativeOptions(begin="Thoughts:", end="Answer:")


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("{% if not thinking %}<think></think>{% endif %}", (), "the chat template writes </think>"),
        ("", ("<think>", "</think>"), "</think> is a token of its own"),
        ("[/THINK]", ("[/THINK]",), None),
    ],
)
def test_models_that_think_are_recognized(template: str, tokens: tuple[str, ...], expected: str | None) -> None:
    assert think.recognizes(ModelText(chat_template=template, added_tokens=frozenset(tokens))) == expected
