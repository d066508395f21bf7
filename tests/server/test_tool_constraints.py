"""Constraints of forced and strict calls, compiled: whatever they let a model write is read as valid calls."""

from __future__ import annotations

import json
import random

import pytest

from engine.parsing.choice import Parsers
from engine.plugins.grammars import llguidance
from engine.plugins.tool_parsers import hermes
from engine.sampling_params import SamplingParams
from engine.server.events import Content, ToolArguments, ToolBegin
from engine.server.reading import Reading
from engine.server.tools import tool_use
from engine.specs.grammar import Matcher
from engine.testing.grammar import END, TABLE, accepts, allowed
from engine.text import Delta

PLACE = {
    "$defs": {"City": {"enum": ["Oslo", "Lima", "}]"]}},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE, "strict": True}},
    {"type": "function", "function": {"name": "ping"}},
]
READ_BY_HERMES = Parsers(tools=hermes.tool_parsers()[0].build(hermes.tool_parsers()[0].options()))
NAMED = {"type": "function", "function": {"name": "get_weather"}}


def reading(choice: object, parallel: bool = True) -> Reading:
    return Reading(parsers=READ_BY_HERMES, tools=tool_use(TOOLS, choice, parallel))  # type: ignore[arg-type]


def matcher(made: Reading) -> Matcher:
    structured = made.constrained(SamplingParams()).structured
    assert structured is not None
    (offer,) = llguidance.grammars()
    return offer.build(offer.options(), tokens=TABLE).compile(structured)


def written(constraint: Matcher, seed: int) -> str:
    """A random text that the constraint allows, up to its end."""
    source, text = random.Random(seed), b""
    while END not in (mask := allowed(constraint)) or (len(mask) > 1 and source.random() < 0.6):
        token = source.choice(sorted(mask - {END}))
        assert constraint.accept(token)
        text += TABLE.tokens[token]
        assert len(text) < 4000
    return text.decode()


def calls_in(made: Reading, text: str) -> list[tuple[str, dict[str, object]]]:
    """The calls that an answer of this text is told as; there must be nothing else."""
    names, arguments = [], {}
    news = made.reader().read(Delta(index=0, text=text, token_ids=[], finish_reason="stop"))
    for event in news.events:
        assert not isinstance(event, Content), text
        if isinstance(event, ToolBegin):
            names.append(event.name)
        elif isinstance(event, ToolArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
    return [(name, json.loads(arguments[i])) for i, name in enumerate(names)]


def check(name: str, arguments: dict[str, object]) -> None:
    if name == "ping":
        assert arguments == {}
    else:
        assert name == "get_weather"
        assert set(arguments) in ({"city"}, {"city", "days"})
        assert arguments["city"] in ("Oslo", "Lima", "}]")
        assert arguments.get("days", 1) in range(1, 10)


@pytest.mark.parametrize("seed", range(10))
def test_whatever_a_named_function_gets_is_one_valid_call(seed: int) -> None:
    made = reading(NAMED)
    ((name, arguments),) = calls_in(made, written(matcher(made), seed))
    assert name == "get_weather"
    check(name, arguments)


@pytest.mark.parametrize("parallel", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_whatever_comes_when_calls_are_required_is_valid_calls(seed: int, parallel: bool) -> None:
    made = reading("required", parallel)
    calls = calls_in(made, written(matcher(made), seed))
    assert calls
    assert parallel or len(calls) == 1
    for name, arguments in calls:
        check(name, arguments)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("Hello.", True),
        ('Well. <tool_call>\n{"name": "get_weather", "arguments": {"city": "Oslo"}}\n</tool_call> Done.', True),
        ('<tool_call>\n{"name": "ping", "arguments": {"any": [1]}}\n</tool_call>', True),
        ('<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>', False),
        ('<tool_call>\n{"name": "other", "arguments": {}}\n</tool_call>', False),
        ("<tool_call>oops", False),
    ],
)
def test_a_strict_function_is_held_to_its_schema_and_text_is_free(text: str, good: bool) -> None:
    ids = list(text.encode())
    assert accepts(matcher(reading("auto")), [*ids, END]) == good
