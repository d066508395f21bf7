"""From the engine's constraints to llguidance's grammars: a JSON document of Lark grammars and JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from engine.plugins.grammars.llguidance import LlguidanceOptions
from engine.plugins.grammars.llguidance.tags import TagWriter
from engine.structured import Structured


def translate(structured: Structured, options: LlguidanceOptions, special: Mapping[str, int]) -> str:
    """The grammar that `LLMatcher` takes.

    Raises:
        ValueError: the value is no JSON, no GBNF or no structural tag.
    """
    value = structured.value
    rules = json_rules(options, structured.whitespace)
    if isinstance(value, tuple):
        return LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(v, ensure_ascii=False) for v in value))
    match structured.kind:
        case "json_object":
            return from_schema({"type": "object"}, rules)
        case "json_schema":
            return from_schema(_parsed(value, "the schema"), rules)
        case "regex":
            return LLMatcher.grammar_from_regex(value)
        case "structural_tag":
            return TagWriter(special, rules).grammar(_parsed(value, "the structural tag"))
        case _:
            return LLMatcher.grammar_from_lark(lark(value))


def json_rules(options: LlguidanceOptions, whitespace: str | None) -> dict[str, Any]:
    """How JSON is written: what the request says of whitespace, or else the options."""
    pattern = options.whitespace if whitespace is None else whitespace
    blanks = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**blanks, "lenient": options.lenient}


def from_schema(schema: Any, rules: Mapping[str, Any]) -> str:
    """A grammar of the JSON that is valid under a schema."""
    return LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=dict(rules))  # type: ignore[arg-type]


def lark(text: str) -> str:
    """A grammar in Lark syntax; one with `::=` is taken for GBNF.

    Raises:
        ValueError: it looks like GBNF but is none.
    """
    if "::=" not in text:
        return text
    try:
        converted: str = any_to_lark(text)
    except Exception as error:  # the converter raises whatever its parser meets
        raise ValueError(f"the grammar is not valid GBNF: {error}") from None
    return converted


def _parsed(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from None


__all__ = ["from_schema", "json_rules", "lark", "translate"]
