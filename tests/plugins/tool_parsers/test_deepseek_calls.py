"""DeepSeek's markers through the shared suite."""

from __future__ import annotations

from engine.plugins.tool_parsers import deepseek_v3
from engine.testing.tool_parser import Example, ToolParserConformance

BEGIN, END = deepseek_v3.SECTION
CALL, SEP, DONE = deepseek_v3.BEGIN, deepseek_v3.SEPARATOR, deepseek_v3.END


class TestDeepSeek(ToolParserConformance):
    (offer,) = deepseek_v3.tool_parsers()
    module = "engine.plugins.tool_parsers.deepseek_v3"
    examples = (
        Example(
            f'{BEGIN}{CALL}function{SEP}f\n```json\n{{"a": "```"}}\n```{DONE}\n'
            f"{CALL}function{SEP}g\n```json\n{{}}\n```{DONE}{END}",
            "",
            [("f", '{"a": "```"}'), ("g", "{}")],
        ),
        Example(
            f'Well.\n\n{BEGIN}{CALL}f{SEP}{{"a": 1}}{DONE}{CALL}g{SEP}{{}}{DONE}{END}',
            "Well.",
            [("f", '{"a": 1}'), ("g", "{}")],
        ),
        Example(f"{BEGIN}{CALL}function{SEP}{{}}{DONE}{END}", "", [("function", "{}")]),
        Example(f"{CALL}f{SEP}{{}}", "", [("f", "{}")]),
        Example(f"{BEGIN}nothing{END}", f"{BEGIN}nothing{END}"),
        Example(f"{BEGIN}{CALL}f{SEP}no{DONE}{END}", f"{BEGIN}{CALL}f{SEP}no{DONE}{END}"),
        Example(f"{BEGIN}{CALL}function{SEP}f\n{{}}", f"{BEGIN}{CALL}function{SEP}f\n{{}}"),
    )
