"""Forms on the real model: texts have them, drafts change nothing, and a neighbour notices nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from engine import LLM, SamplingParams
from engine.structured import Structured

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["tall", "short"]}, "age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
COMPACT = r'\{"kind":"(tall|short)","age":\d+\}'

FORMS: dict[str, tuple[Structured | None, Callable[[str], object]]] = {
    "schema": (Structured.schema(SCHEMA), lambda text: set(json.loads(text)) == {"kind", "age"}),
    "compact": (Structured.schema(SCHEMA, whitespace=""), lambda text: re.fullmatch(COMPACT, text)),
    "regex": (Structured("regex", "(19|20)[0-9]{2}-[01][0-9]"), lambda text: re.fullmatch(r"(19|20)\d\d-[01]\d", text)),
    "choice": (Structured("choice", ("Ja, gern", "Nein")), lambda text: text in ("Ja, gern", "Nein")),
}
PROMPT = "A person, described in a few words:"


def texts(llm: LLM, names: list[str]) -> dict[str, str]:
    """All at once, in one batch."""
    forms = {name: FORMS[name][0] if name in FORMS else None for name in names}
    streams = {
        name: llm.stream(PROMPT, SamplingParams(temperature=0.0, max_tokens=24, structured=form))
        for name, form in forms.items()
    }
    found = dict.fromkeys(names, "")
    while streams:
        for name, stream in list(streams.items()):
            if (delta := next(stream, None)) is None:
                del streams[name]
            else:
                found[name] += delta.text
    return found


@pytest.mark.slow
def test_texts_have_their_form_and_neither_drafts_nor_neighbours_change_them() -> None:
    fixed = ("model.dtype=float32", "kv_cache.memory=64MiB")
    with LLM(overrides=fixed) as llm:
        alone = texts(llm, ["free"])
        plain = texts(llm, [*FORMS, "free"])
        word = alone["free"].split()[0]
        other = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=4, bad_words=(word,)))[0].text
    assert not other.split()[0].startswith(word)
    for name, (_, holds) in FORMS.items():
        assert holds(plain[name]), f"{name}: {plain[name]!r}"
    assert plain["free"] == alone["free"]
    with LLM(overrides=(*fixed, "speculator.use=ngram", "speculator.controller=false")) as llm:
        assert texts(llm, [*FORMS, "free"]) == plain
