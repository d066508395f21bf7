"""The llguidance component: the suite of the kit, and structural tags in detail."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engine.plugins.grammars import llguidance
from engine.specs.grammar import Matcher
from engine.structured import Structured
from engine.testing.grammar import END, TABLE, GrammarConformance, accepts, allowed, cut

CALL = TABLE.special["<call>"]
NUMBER = {"type": "regex", "pattern": "[0-9]+"}
TEXT = {"type": "any_text"}


class TestLlguidance(GrammarConformance):
    """As the kit has it."""

    (offer,) = llguidance.grammars()
    module = "engine.plugins.grammars.llguidance"


def compiled(value: Any, **options: Any) -> Matcher:
    (offer,) = llguidance.grammars()
    backend = offer.build(offer.options(**options), tokens=TABLE)
    return backend.compile(value if isinstance(value, Structured) else Structured("structural_tag", json.dumps(value)))


def tag(begin: str, content: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def triggered(*triggers: str, **more: Any) -> dict[str, Any]:
    tags = [tag("<f>a", NUMBER, "</f>"), tag("<f>b", NUMBER, "</f>"), tag("[x]", NUMBER, ".")]
    kept = [t for t in tags if t["begin"].startswith(triggers)]
    return {"type": "triggered_tags", "triggers": list(triggers), "tags": kept, **more}


FORMATS = {
    "const": {"type": "const_string", "value": "<call>hi"},
    "sequence": {"type": "sequence", "elements": [{"type": "const_string", "value": "n="}, NUMBER]},
    "or": {"type": "or", "elements": [NUMBER, {"type": "const_string", "value": "none"}]},
    "thought": {"type": "sequence", "elements": [tag("<t>", TEXT, "</t>"), NUMBER]},
    "text and tag": {"type": "sequence", "elements": [TEXT, tag("<f>", NUMBER, "</f>")]},
    "text and control token": {"type": "sequence", "elements": [TEXT, tag("<call>", NUMBER, "</f>")]},
    "text and fixed": {"type": "sequence", "elements": [TEXT, {"type": "const_string", "value": "."}, NUMBER]},
    "grammar": tag("<g>", {"type": "grammar", "grammar": 'start: "x"+'}, "</g>"),
    "triggered": triggered("<f>", "[x]"),
    "at least one": triggered("<f>", at_least_one=True),
    "just one": triggered("<f>", at_least_one=True, stop_after_first=True),
    "one or none": triggered("<f>", stop_after_first=True),
    "triggered inside": tag("(", triggered("<f>"), ")"),
    "separated": {
        "type": "tags_with_separator",
        "tags": [tag("<f>", NUMBER, "</f>"), tag("<g>", NUMBER, "</g>")],
        "separator": ", ",
    },
    "separated, at least one": {
        "type": "tags_with_separator",
        "tags": [tag("<f>", NUMBER, "</f>")],
        "separator": ";",
        "at_least_one": True,
    },
}

FITS = [
    ("sequence", "n=12"), ("or", "none"), ("or", "7"), ("thought", "<t>any < thing</t>12"),
    ("text and tag", "hm <f>1</f>"),
    ("text and fixed", "so it is.12"), ("grammar", "<g>xxx</g>"), ("triggered", ""), ("triggered", "a < b [ c"),
    ("triggered", "see <f>a1</f>, <f>b2</f> and [x]3. done"), ("at least one", "see <f>a1</f> there"),
    ("just one", "so <f>b1</f>"), ("one or none", "none"), ("one or none", "x<f>a1</f>"),
    ("triggered inside", "(a <f>a1</f> b)"),
    ("triggered inside", "(ab)"), ("separated", ""), ("separated", "<f>1</f>, <g>2</g>, <f>3</f>"),
    ("separated, at least one", "<f>1</f>;<f>2</f>"),
]  # fmt: skip

MISFITS = [
    ("sequence", "n="), ("or", "no"), ("thought", "<t>no end"), ("text and tag", "hm <f>x"), ("text and fixed", "so.x"),
    ("triggered", "<f>c"), ("triggered", "<f>a1</f><f>x"), ("triggered", "[x]1x"), ("at least one", "none"),
    ("just one", "<f>a1</f> more"), ("one or none", "x<f>a1</f>y"), ("triggered inside", "(ab) more"),
    ("separated", "<f>1</f><f>2</f>"), ("separated, at least one", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text"), FITS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_tag_takes_texts_of_its_form(name: str, text: str, seed: int | None) -> None:
    assert accepts(compiled({"format": FORMATS[name]}), [*cut(text, seed), END])


@pytest.mark.parametrize(("name", "text"), MISFITS)
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_a_tag_refuses_others(name: str, text: str, seed: int | None) -> None:
    assert not accepts(compiled({"format": FORMATS[name]}), [*cut(text, seed), END])


def test_control_tokens_end_free_text() -> None:
    matcher = compiled({"format": FORMATS["text and control token"]})
    assert accepts(matcher, [*cut("well "), CALL, *cut("12</f>"), END])
    assert not accepts(compiled({"format": FORMATS["text and control token"]}), [*cut("<call>12</f>"), END])
    assert accepts(compiled({"format": FORMATS["const"]}), [CALL, *cut("hi"), END])


def test_the_older_form_of_a_tag() -> None:
    older = {
        "triggers": ["<f"],
        "structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}],
    }
    assert accepts(compiled(older), [*cut("it is <f>12</f>"), END])
    assert not accepts(compiled(older), [*cut("it is <f>x")])


@pytest.mark.parametrize(
    ("wrong", "reason"),
    [
        ([], "must be an object"),
        ({"format": "text"}, "no format of type None"),
        ({"format": {"type": "tag", "begin": 1, "content": TEXT, "end": ""}}, "'begin' must be a string"),
        ({"format": {"type": "sequence", "elements": []}}, "'elements' must be a list that is not empty"),
        ({"format": {"type": "sequence", "elements": [TEXT, NUMBER]}}, "any_text must be last"),
        ({"format": {"type": "json_schema", "json_schema": "x"}}, "must be an object or a boolean"),
        ({"format": {"type": "json_schema"}}, "lacks 'json_schema'"),
        ({"format": {**triggered("<f>"), "triggers": ["<z>"]}}, "no trigger begins"),
        ({"format": {"type": "regex", "pattern": "("}}, "regex"),
    ],
)
def test_a_wrong_tag_is_refused_by_name(wrong: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        compiled(wrong)


def test_what_a_schema_can_not_enforce_is_refused_unless_told() -> None:
    unheard = Structured.schema({"type": "string", "not": {"const": "x"}})
    with pytest.raises(ValueError, match="not"):
        compiled(unheard)
    assert accepts(compiled(unheard, lenient=True), [*cut('"x"'), END])


def test_too_much_work_is_refused() -> None:
    long = Structured("regex", "(a|b|c){1,1000}[a-z]{1,1000}x{3,2000}")
    with pytest.raises(ValueError, match="too big"):
        compiled(long, compile_fuel=1)
    with pytest.raises(ValueError, match="too many states"):
        allowed(compiled(long, max_states=10))
    assert accepts(compiled(long), cut("a" * 900))


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("^ab+$", "abb"), ("^(a|b)$", "b"), (r"cost: \$", "cost: $"), (r"^x\\$", "x\\"), (r"\^a", "^a"), ("a/b", "a/b")],
)
def test_anchors_around_a_regex_are_taken(pattern: str, text: str) -> None:
    matcher = compiled(Structured("regex", pattern))
    assert accepts(matcher, [*cut(text), END])


def test_a_regex_that_is_wrong_says_why_in_one_line() -> None:
    with pytest.raises(ValueError, match=r'^invalid regex "\(a": unclosed group$'):
        compiled(Structured("regex", "(a"))
