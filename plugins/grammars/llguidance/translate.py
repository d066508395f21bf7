"""From the engine's constraints to llguidance's grammars: a JSON document of Lark grammars and JSON schemas."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from engine.plugins.grammars.llguidance import LlguidanceOptions
from engine.plugins.grammars.llguidance.bodies import from_grammar, from_regex, guided
from engine.plugins.grammars.llguidance.tags import TagWriter
from engine.structured import Structured

_HEAD: Final = '%llguidance {"no_forcing": true}\n'
"""Else only the library's own way to cut a text into tokens would be allowed wherever a single text can follow."""


def translate(structured: Structured, options: LlguidanceOptions, special: Mapping[str, int]) -> str:
    """The grammar that `LLMatcher` takes.

    Raises:
        ValueError: the value is no JSON, no GBNF or no structural tag.
    """
    rules = json_rules(options, structured.whitespace)
    if structured.kind == "structural_tag":
        lark, beside = TagWriter(special, rules).grammar(_parsed(structured.value, "the structural tag"))
        return document(lark, *beside)
    return document("start: @body", {"name": "body", **_body(structured, rules)})


def _body(structured: Structured, rules: Mapping[str, Any]) -> dict[str, Any]:
    value = structured.value
    if isinstance(value, tuple):
        return {"lark_grammar": "start: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in value)}
    match structured.kind:
        case "json_object":
            return {"json_schema": guided({"type": "object"}, rules)}
        case "json_schema":
            return {"json_schema": guided(_parsed(value, "the schema"), rules)}
        case "regex":
            return {"lark_grammar": from_regex(value)}
        case _:
            return {"lark_grammar": from_grammar(value)}


def document(lark: str, *beside: Mapping[str, Any]) -> str:
    """A main grammar and those that it refers to by name."""
    return json.dumps({"grammars": [{"name": "main", "lark_grammar": _HEAD + lark}, *beside]})


def json_rules(options: LlguidanceOptions, whitespace: str | None) -> dict[str, Any]:
    """How JSON is written: what the request says of whitespace, or else the options."""
    pattern = options.whitespace if whitespace is None else whitespace
    blanks = {"whitespace_pattern": pattern} if pattern else {"whitespace_flexible": False}
    return {**blanks, "lenient": options.lenient}


def _parsed(text: str | tuple[str, ...], what: str) -> Any:
    try:
        return json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{what} is not valid JSON: {error}") from None


__all__ = ["document", "json_rules", "translate"]
