"""From the fields that ask for structured output to one constraint: OpenAI's `response_format`, and what other servers
have beside it, `structured_outputs` and `guided_…`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from engine.server.errors import bad_request
from engine.server.protocol import Generate
from engine.structured import Structured

_FORMATS: Final = ("text", "json_object", "json_schema", "structural_tag")
_KINDS: Final = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")
_GUIDED: Final = ("json", "regex", "choice", "grammar", "whitespace_pattern")
_SETTINGS: Final = ("whitespace_pattern", "disable_any_whitespace", "disable_additional_properties")


def structured_output(body: Generate) -> Structured | None:
    """What the text must be; None when anything may come.

    Raises:
        ApiError: 400 when a field is malformed, or two of them ask for something.
    """
    try:
        return _the_only_one(body)
    except RecursionError:
        raise bad_request("the schema is nested too deeply", "response_format") from None


def _the_only_one(body: Generate) -> Structured | None:
    asked = {
        "response_format": _response_format(body.response_format),
        "structured_outputs": _structured(body.structured_outputs or {}, "structured_outputs", "structured_outputs."),
        "guided_…": _structured({name: getattr(body, f"guided_{name}") for name in _GUIDED}, "guided_…", "guided_"),
    }
    found = {name: structured for name, structured in asked.items() if structured is not None}
    if len(found) > 1:
        raise bad_request(f"{' and '.join(found)} exclude each other; send one of them", next(iter(found)))
    return next(iter(found.values()), None)


def _response_format(given: Mapping[str, Any] | None) -> Structured | None:
    where = "response_format"
    match "text" if given is None else given.get("type"):
        case "text":
            return None
        case "json_object":
            return Structured("json_object")
        case "json_schema":
            inner = (given or {}).get("json_schema")
            if not isinstance(inner, dict) or "schema" not in inner:
                raise bad_request("response_format.json_schema must be an object with a schema", where)
            return _schema(inner["schema"], f"{where}.json_schema.schema")
        case "structural_tag":
            return Structured("structural_tag", json.dumps(given))
    raise bad_request(f"response_format.type must be one of {', '.join(_FORMATS)}", where)


def _structured(given: Mapping[str, Any], where: str, prefix: str) -> Structured | None:
    """Exactly one of the kinds, and settings; None if there is nothing."""
    asked = {name: value for name, value in given.items() if value is not None and value is not False}
    if not asked:
        return None
    if unknown := [name for name in asked if name not in (*_KINDS, *_SETTINGS)]:
        raise bad_request(f"{where} has no field {unknown[0][:40]!r}; it takes {', '.join(_KINDS)}", where)
    kinds = [name for name in _KINDS if name in asked]
    if len(kinds) != 1:
        raise bad_request(f"{where} must hold exactly one of {', '.join(_KINDS)}", where)
    closed = bool(asked.get("disable_additional_properties"))
    made = _one(kinds[0], asked[kinds[0]], f"{prefix}{kinds[0]}", closed=closed)
    pattern = "" if asked.get("disable_any_whitespace") else asked.get("whitespace_pattern")
    if not isinstance(pattern, str | None):
        raise bad_request(f"{prefix}whitespace_pattern must be a text, a regex", f"{prefix}whitespace_pattern")
    return msgspec.structs.replace(made, whitespace=pattern)


def _one(kind: str, value: Any, where: str, *, closed: bool) -> Structured:
    match kind:
        case "json":
            return _schema(value, where, closed=closed)
        case "json_object":
            return Structured("json_object")
        case "choice":
            if not isinstance(value, list) or not value or not all(isinstance(v, str) and v for v in value):
                raise bad_request(f"{where} must be a list of texts that are not empty", where)
            return Structured("choice", tuple(value))
        case "structural_tag":
            text = value if isinstance(value, str) else json.dumps(value)
            return Structured("structural_tag", _text(text, where))
        case "regex":
            return Structured("regex", _text(value, where))
        case _:
            return Structured("grammar", _text(value, where))


def _schema(value: Any, where: str, *, closed: bool = False) -> Structured:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise bad_request(f"{where} is not valid JSON: {error}", where) from None
    if not isinstance(value, dict | bool):
        raise bad_request(f"{where} must be a JSON schema, that is an object", where)
    return Structured.schema(_closed(value) if closed else value)


def _closed(schema: Any) -> Any:
    """The schema with no further properties for objects that list some and don't say otherwise."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: value if key in ("enum", "const", "default") else _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise bad_request(f"{where} must be a text that is not empty", where)
    return value


__all__ = ["structured_output"]
