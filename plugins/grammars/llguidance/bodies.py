"""Schemas, regexes and grammars as llguidance takes them, alone or inside a structural tag."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

_ANCHORED: Final = re.compile(r"(?<!\\)(?:\\\\)*\$$")
"""Ends with a dollar sign that is not escaped."""


def guided(schema: Any, rules: Mapping[str, Any]) -> Any:
    """A schema that says how its JSON is written; the server's word goes before the client's."""
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        return schema
    own = schema.get("x-guidance")
    return {**schema, "x-guidance": {**(own if isinstance(own, dict) else {}), **rules}}


def from_regex(pattern: str) -> str:
    """Lark for a regex. It matches the whole text, so anchors at its ends say nothing new; the library knows none."""
    inner = pattern.removeprefix("^")
    if _ANCHORED.search(inner):
        inner = inner[:-1]
    lark: str = json.loads(LLMatcher.grammar_from_regex(inner))["grammars"][0]["lark_grammar"]
    return lark


def from_grammar(text: str) -> str:
    """Lark for Lark or GBNF, which is told by its `::=`.

    Raises:
        ValueError: it looks like GBNF but is none.
    """
    if "::=" not in text:
        return text
    try:
        converted: str = any_to_lark(text)
    except Exception as error:  # the converter raises whatever its parser meets
        raise ValueError(f"the grammar is not valid GBNF: {' '.join(str(error).split())}") from None
    return converted


__all__ = ["from_grammar", "from_regex", "guided"]
