"""Python calls through the shared suite."""

from __future__ import annotations

import pytest

from engine.parsing.python_call import as_json
from engine.plugins.tool_parsers import pythonic
from engine.testing.tool_parser import Example, ToolParserConformance


class TestPythonic(ToolParserConformance):
    (offer,) = pythonic.tool_parsers()
    module = "engine.plugins.tool_parsers.pythonic"
    examples = (
        Example('[get_weather(city="Oslo")]', "", [("get_weather", '{"city": "Oslo"}')]),
        Example(
            "[f(a=1, b='x, )', c=[1, {'q': True}], d=None), g()]\n",
            "",
            [("f", '{"a": 1, "b": "x, )", "c": [1, {"q": true}], "d": null}'), ("g", "{}")],
        ),
        Example("<|python_start|>[any(a=true,)]<|python_end|> Done.", "Done.", [("any", '{"a": true}')]),
        Example("[f(a=foo(1), b=2)]", "", [("f", '{"a": "foo(1)", "b": 2}')]),
        Example("[f(a=1, 2)]", "", [("f", '{"a": 1, "argument 1": 2}')]),
        Example("[f(a=1), oops", ", oops", [("f", '{"a": 1}')]),
        Example("[f(a=[1, ", "", [("f", '{"a": "[1,"')]),
        Example("[1, 2]", "[1, 2]"),
        Example("[unknown(a=1)]", "[unknown(a=1)]"),
        Example("[f(1)]", "[f(1)]"),
        Example("[f](http://x)", "[f](http://x)"),
        Example("<|python_start|>print(1)<|python_end|>", "<|python_start|>print(1)<|python_end|>"),
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (" 1 ", "1"),
        ("-1.5e3", "-1500.0"),
        ("'it\\'s'", '"it\'s"'),
        ('"two\nlines"', '"two\\nlines"'),
        ("(1, 2)", "[1, 2]"),
        ("{'a': None}", '{"a": null}'),
        ('{"a": null}', '{"a": null}'),
        ("{1, 2}", '"{1, 2}"'),
        ("1e999", '"1e999"'),
        ("[" * 5000, '"' + "[" * 5000 + '"'),
        ("x + y", '"x + y"'),
        ("'\\ud800é'", '"\\ud800\\u00e9"'),
        ("", '""'),
    ],
)
def test_literals_become_json_and_anything_else_a_string(source: str, expected: str) -> None:
    assert as_json(source) == expected
