"""Which parsers `auto` takes for the models of the field, and what it says of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from engine.config.load import load_config
from engine.errors import ConfigError
from engine.hooks import hookimpl
from engine.parsing.choice import Parsers, choose_parsers
from engine.plugins.reasoning_parsers import mistral as mistral_thoughts
from engine.plugins.reasoning_parsers import think
from engine.plugins.tool_parsers import declarative, deepseek_v3, hermes, llama3_json, mistral, pythonic
from engine.registry import Registry
from engine.specs.tool_parser import ModelText

BUILT_IN = {
    module.__name__.removeprefix("engine.plugins."): module
    for module in (declarative, deepseek_v3, hermes, llama3_json, mistral, pythonic, think, mistral_thoughts)
}


def choose(template: str, tokens: tuple[str, ...] = (), *overrides: str, plugins: Any = BUILT_IN) -> Parsers:
    model = ModelText(chat_template=template, added_tokens=frozenset(tokens))
    return choose_parsers(load_config(None, overrides).config, Registry.of(plugins), model)


def names(parsers: Parsers) -> list[str]:
    return [picked.name for picked in parsers.picked]


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        ("<tool_call> … </think>", ("<tool_call>", "<think>", "</think>"), ["hermes", "think"]),  # Qwen3
        ("<tool_call> …", ("<tool_call>",), ["hermes", "none"]),  # Qwen2.5
        ("<tool_call><function=…", ("<tool_call>", "</think>"), ["none", "think"]),  # Qwen3-Coder's is another format
        ("<|python_tag|> …", ("<|python_tag|>", "<|eom_id|>"), ["llama3_json", "none"]),  # Llama 3.1
        ("<|python_start|> …", ("<|python_start|>", "<|python_end|>"), ["pythonic", "none"]),  # Llama 4
        ("[AVAILABLE_TOOLS] …", ("[TOOL_CALLS]",), ["mistral", "none"]),  # Mistral
        ("[AVAILABLE_TOOLS] …", ("[TOOL_CALLS]", "[THINK]", "[/THINK]"), ["mistral", "mistral"]),  # Magistral
        ("<｜tool▁call▁begin｜> … </think>", ("<｜tool▁call▁begin｜>",), ["deepseek_v3", "think"]),  # DeepSeek R1
        ("<|im_start|> …", ("<|im_start|>",), ["none", "none"]),  # SmolLM2
        ("", (), ["none", "none"]),
    ],
)
def test_the_models_of_the_field(template: str, tokens: tuple[str, ...], expected: list[str]) -> None:
    chosen = choose(template, tokens)
    assert names(chosen) == expected
    assert [chosen.tools is None, chosen.reasoning is None] == [name == "none" for name in expected]


def test_a_choice_says_why_and_whom_it_passed_by() -> None:
    tools, reasoning = choose("<tool_call>").picked
    assert (tools.part, tools.why) == ("parsers.tools", "the chat template writes <tool_call>")
    assert set(tools.refused) < {"declarative", "deepseek_v3", "llama3_json", "mistral", "pythonic"}
    assert "no format that an installed parser knows" in reasoning.why


def test_what_is_named_is_taken() -> None:
    chosen = choose("<tool_call> </think>", (), "parsers.tools=mistral", "parsers.reasoning=none")
    assert names(chosen) == ["mistral", "none"]
    assert {picked.why for picked in chosen.picked} == {"named in the configuration"}
    assert chosen.reasoning is None


def test_options_reach_the_parser() -> None:
    chosen = choose("", (), "parsers.tools={use: declarative, options: {begin: '<x>', end: '</x>'}}")
    assert chosen.tools is not None
    assert chosen.tools.markers == ("<x>", "</x>")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("parsers.tools=hermez", "did you mean 'hermes'"),
        ("parsers.tools=declarative", "parsers.tools.options.begin"),
        ("parsers.reasoning={use: think, options: {opened: never}}", "parsers.reasoning.options.opened"),
    ],
)
def test_a_bad_name_or_option_is_refused_with_its_place(override: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        choose("", (), override)


class Confused:
    """A plugin whose parser can't judge."""

    @hookimpl
    def tool_parsers(self) -> list[Any]:
        def recognizes(model: ModelText) -> str | None:
            raise RuntimeError("no idea")

        (offer,) = hermes.tool_parsers()
        return [replace(offer, name="confused", recognizes=recognizes, rank=9)]


def test_a_parser_that_fails_to_judge_is_passed_by(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        chosen = choose("<tool_call>", plugins={**BUILT_IN, "strange": Confused()})
    assert names(chosen)[0] == "hermes"
    assert "confused" in caplog.text
    assert "no idea" in caplog.text
