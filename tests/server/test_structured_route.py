"""What requests say of the form of their text, as it reaches the core."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.messages import FinishReason, Output
from engine.structured import Structured

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
TAG = {"type": "structural_tag", "format": {"type": "any_text"}}


def asked(live: Any) -> Structured | None:
    found: Structured | None = live.core.calls[-1].params.structured
    return found


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Structured("json_object")),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            Structured.schema(SCHEMA),
        ),
        ({"response_format": TAG}, Structured("structural_tag", json.dumps(TAG))),
        ({"structured_outputs": {"json": SCHEMA}}, Structured.schema(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, Structured.schema(SCHEMA)),
        ({"structured_outputs": {"regex": "a+", "choice": None}}, Structured("regex", "a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Structured("choice", ("a", "b"))),
        ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Structured("grammar", 'root ::= "a"')),
        ({"structured_outputs": {"json_object": True}}, Structured("json_object")),
        ({"structured_outputs": {"json_object": False, "regex": "a"}}, Structured("regex", "a")),
        ({"structured_outputs": {"structural_tag": TAG}}, Structured("structural_tag", json.dumps(TAG))),
        ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Structured("structural_tag", json.dumps(TAG))),
        (
            {"structured_outputs": {"json": SCHEMA, "whitespace_pattern": " ?"}},
            Structured.schema(SCHEMA, whitespace=" ?"),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
            Structured.schema(SCHEMA, whitespace=""),
        ),
        (
            {"structured_outputs": {"json": SCHEMA, "disable_additional_properties": True}},
            Structured.schema({**SCHEMA, "additionalProperties": False}),
        ),
        ({"guided_json": SCHEMA}, Structured.schema(SCHEMA)),
        ({"guided_json": SCHEMA, "guided_whitespace_pattern": ""}, Structured.schema(SCHEMA, whitespace="")),
        ({"guided_regex": "a+"}, Structured("regex", "a+")),
        ({"guided_choice": ["a"]}, Structured("choice", ("a",))),
        ({"guided_grammar": 'start: "a"'}, Structured("grammar", 'start: "a"')),
    ],
    ids=lambda value: json.dumps(value)[:70] if isinstance(value, dict) else "",
)
@pytest.mark.parametrize("route", ["chat", "complete"])
def test_every_spelling_becomes_one_constraint(live: Any, route: str, fields: dict[str, Any], expected: Any) -> None:
    response = getattr(live, route)(**fields)
    assert response.status_code == 200, response.text
    assert asked(live) == expected
    assert "X-Engine-Ignored-Fields" not in response.headers


def test_closing_a_schema_leaves_data_and_explicit_words_alone(live: Any) -> None:
    schema = {
        "properties": {"a": {"properties": {}}, "b": {"additionalProperties": True, "properties": {}}},
        "anyOf": [{"properties": {"c": {}}}],
        "default": {"properties": {}},
    }
    live.chat(structured_outputs={"json": schema, "disable_additional_properties": True})
    closed = json.loads(str(asked(live).value))  # type: ignore[union-attr]
    assert closed["additionalProperties"] is False
    assert closed["properties"]["a"]["additionalProperties"] is False
    assert closed["properties"]["b"]["additionalProperties"] is True
    assert closed["anyOf"][0]["additionalProperties"] is False
    assert closed["default"] == {"properties": {}}


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_core_finds_wrong_is_a_400_with_its_reason(serving: Any, stream: bool) -> None:
    text = "the regex can't be used: unclosed group"
    live = serving(lambda call: [Output("", finish_reason=FinishReason.ERROR, error=text, invalid=True)])
    error = live.error(live.chat(structured_outputs={"regex": "("}, stream=stream))
    assert error["message"] == text


@pytest.mark.parametrize("depth", [300, 900, 3000, 100_000])
def test_a_schema_nested_beyond_reason_is_no_server_error(live: Any, depth: int) -> None:
    schema = '{"items":' * depth + "{}" + "}" * depth
    fields = f'"structured_outputs": {{"json": {schema}, "disable_additional_properties": true}}'
    response = live.http.post("/v1/completions", content=f'{{"prompt": "a", {fields}}}')
    assert response.status_code in {300: [200], 100_000: [400]}.get(depth, [200, 400])


def test_an_unknown_field_is_named_or_refused(serving: Any) -> None:
    relaxed = serving().chat(favourite_color="red")
    assert relaxed.headers["X-Engine-Ignored-Fields"] == "favourite_color"
    strict = serving(overrides=("server.strict=true",))
    for response in (
        strict.chat(favourite_color="red"),
        strict.complete(favourite_color="red"),
        strict.http.post("/tokenize", json={"prompt": "a", "favourite_color": 1}),
    ):
        error = strict.error(response)
        assert error["param"] == "favourite_color"
        assert "favourite_color" in error["message"]
    assert strict.chat().status_code == 200
