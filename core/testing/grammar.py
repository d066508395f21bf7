"""Conformance of grammar components: a mask allows exactly what is accepted, and whatever is walked back is forgotten.

Runs over a toy vocabulary: single bytes, and pieces of several that occur in the tests' texts, so that every text can
be cut into tokens in many ways.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Final

import numpy as np
import pytest

from engine.specs.grammar import GrammarBackend, Matcher, TokenTable
from engine.structured import Structured
from engine.testing.offer import OfferConformance

_PIECES: Final = (
    '{"', '":', '", "', ": ", "true", "false", "null", "red", "re", "color", '"color"', "]}", "[1", "12", "  ", "\n ",
    "yes", "no", "<f>", "</f>", "é", "日本",
)  # fmt: skip
_SPECIAL: Final = ("<end>", "<turn>", "<call>")

SCHEMA: Final = {
    "type": "object",
    "properties": {
        "color": {"enum": ["red", "green"]},
        "ok": {"type": "boolean"},
        "rows": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["color", "ok"],
    "additionalProperties": False,
}
"""What the suite's objects must be."""

_TAG: Final = {
    "format": {
        "type": "triggered_tags",
        "triggers": ["<f>"],
        "tags": [{"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]+"}, "end": "</f>"}],
    }
}

SPECS: Final = {
    "json_object": Structured("json_object"),
    "json_schema": Structured.schema(SCHEMA),
    "regex": Structured("regex", "[a-c]+-[0-9]{2}"),
    "choice": Structured("choice", ("yes", "no", "not é", 'say "日本"')),
    "grammar": Structured("grammar", 'root ::= "(" (root | [0-9]+) ")"'),
    "lark": Structured("grammar", 'start: "(" (start | /[0-9]+/) ")"'),
    "structural_tag": Structured("structural_tag", json.dumps(_TAG)),
}

GOOD: Final = (
    ("json_object", '{}'), ("json_object", '{"a": [1, {"b": null}], "é": "日本"}'),
    ("json_schema", '{"color": "red", "ok": true}'), ("json_schema", '{"color":"green","ok":false,"rows":[1,12]}'),
    ("json_schema", '{\n  "color": "red",\n  "ok": true\n}'),
    ("regex", "abc-12"), ("choice", "no"), ("choice", "not é"), ("choice", 'say "日本"'),
    ("grammar", "((12))"), ("lark", "((12))"),
    ("structural_tag", "free text"), ("structural_tag", "see <f>12</f> and <f>3</f> < >"),
)  # fmt: skip
"""Complete texts by the name of their constraint in `SPECS`."""

BAD: Final = (
    ("json_object", "["), ("json_object", '{"a": 1,}'), ("json_schema", '{"color": "blue"'), ("json_schema", '{"ok"'),
    ("json_schema", '{"color": "red", "ok": true, "rows": [1, 2, 3, 4'), ("json_schema", '{"color": "red"}'),
    ("regex", "abcd"), ("choice", "nobody"), ("grammar", "()"), ("lark", "((1)1"), ("structural_tag", "<f>x"),
)  # fmt: skip
"""Texts that break their constraint at the last character at the latest."""


def toy_table() -> TokenTable:
    """Bytes 0 to 255, pieces, three control tokens of which the first ends a text, and an id that nobody knows."""
    tokens = [bytes([byte]) for byte in range(256)] + [piece.encode() for piece in _PIECES]
    special = {text: len(tokens) + i for i, text in enumerate(_SPECIAL)}
    return TokenTable(
        tokens=[*tokens, *(text.encode() for text in _SPECIAL), b""],
        special=special,
        ends=(special["<end>"],),
        encode=lambda text: list(text.encode()),
    )


TABLE: Final = toy_table()
END: Final = TABLE.ends[0]


def cut(text: str, seed: int | None = None) -> list[int]:
    """A text as tokens: bytes, or a random choice among the tokens that fit at each place."""
    raw, at, ids, rng = text.encode(), 0, [], random.Random(seed)
    while at < len(raw):
        fitting = [i for i, t in enumerate(TABLE.tokens[: 256 + len(_PIECES)]) if raw.startswith(t, at)]
        ids.append(rng.choice(fitting) if seed is not None else raw[at])
        at += len(TABLE.tokens[ids[-1]])
    return ids


def allowed(matcher: Matcher) -> set[int]:
    """The ids that the mask allows."""
    mask = np.full(TABLE.words, -1, dtype=np.int32)  # whatever was there before
    matcher.fill(mask)
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")
    return {int(i) for i in np.flatnonzero(bits)}


def accepts(matcher: Matcher, ids: Sequence[int]) -> bool:
    """Walk a matcher along; False at the first token that may not follow."""
    return all(matcher.accept(token) for token in ids)


every_kind = pytest.mark.parametrize("name", SPECS)
good_texts = pytest.mark.parametrize(("name", "text"), GOOD)


class GrammarConformance(OfferConformance):
    """Subclasses set `offer` and `module`."""

    def backend(self) -> GrammarBackend:
        """The component, over the toy vocabulary."""
        backend = self.offer.build(self.options(), tokens=TABLE)
        assert isinstance(backend, GrammarBackend)
        return backend

    def matcher(self, name: str) -> Matcher:
        """A matcher for one of `SPECS`."""
        return self.backend().compile(SPECS[name])

    @good_texts
    def test_a_good_text_is_accepted_however_it_is_cut(self, name: str, text: str) -> None:
        """And may end where it ends, once."""
        pristine = self.matcher(name)
        for seed in (None, *range(12)):
            matcher = pristine.fork()
            assert accepts(matcher, cut(text, seed))
            assert END in allowed(matcher)
            assert matcher.accept(END)
            assert matcher.is_terminated()
            assert not matcher.accept(END)
            assert not matcher.accept(ord("x"))

    @pytest.mark.parametrize(("name", "text"), BAD)
    def test_a_bad_text_is_not(self, name: str, text: str) -> None:
        """However it is cut, and it can't end there either."""
        pristine = self.matcher(name)
        for seed in (None, *range(12)):
            assert not accepts(pristine.fork(), [*cut(text, seed), END])

    @good_texts
    def test_the_mask_is_what_is_accepted(self, name: str, text: str) -> None:
        """For every token of the vocabulary, at every place of the text; the attempts leave no trace."""
        matcher = self.matcher(name)
        for token in [*cut(text, seed=1), END]:
            mask = allowed(matcher)
            for candidate in range(len(TABLE.tokens)):
                took = matcher.accept(candidate)
                assert took == (candidate in mask), f"token {candidate} {TABLE.tokens[candidate]!r}"
                matcher.rollback(int(took))
            assert allowed(matcher) == mask
            assert matcher.accept(token)
        assert allowed(matcher) == {END}

    @every_kind
    def test_control_tokens_and_unknown_ids_are_no_text(self, name: str) -> None:
        """Whatever they spell."""
        mask = allowed(self.matcher(name))
        assert not mask & {TABLE.special["<turn>"], TABLE.special["<call>"]}
        assert max(mask) < len(TABLE.tokens) - 1

    @good_texts
    def test_rollback_leads_back(self, name: str, text: str) -> None:
        """From every place to every earlier one, also over the end token."""
        ids = [*cut(text, seed=2), END]
        matcher, masks = self.matcher(name), []
        for token in ids:
            masks.append(allowed(matcher))
            assert matcher.accept(token)
        for back in range(len(ids) + 1):
            matcher.rollback(back)
            assert allowed(matcher) == ([*masks, {END}])[len(ids) - back]
            assert accepts(matcher, ids[len(ids) - back :])

    @good_texts
    def test_forks_are_independent(self, name: str, text: str) -> None:
        """One goes on while the other stays, in either direction."""
        ids = cut(text, seed=3)
        half = len(ids) // 2
        one = self.matcher(name)
        assert accepts(one, ids[:half])
        other, mask = one.fork(), allowed(one)
        assert accepts(other, [*ids[half:], END])
        assert allowed(one) == mask
        assert accepts(one, [*ids[half:], END])

    @pytest.mark.parametrize(
        ("name", "text"), [("json_schema", '{"color":"red","ok":true,"rows":[]}'), ("choice", "yes"), ("regex", "a-12")]
    )
    def test_a_text_that_can_only_end_is_terminated(self, name: str, text: str) -> None:
        """Then only an end token is left."""
        matcher = self.matcher(name)
        assert not matcher.is_terminated()
        assert accepts(matcher, cut(text))
        assert matcher.is_terminated()
        assert allowed(matcher) == {END}

    def test_blanks_come_to_an_end(self) -> None:
        """A model that likes blanks would write nothing else."""
        matcher = self.matcher("json_object")
        assert accepts(matcher, cut("{"))
        assert not accepts(matcher, [ord(" ")] * 1000)

    def test_a_request_decides_about_blanks(self) -> None:
        """No blank at all, or those of its pattern."""
        backend = self.backend()
        none = backend.compile(Structured("json_object", whitespace=""))
        assert not accepts(none.fork(), cut('{"a": 1}'))
        assert accepts(none.fork(), cut('{"a":1}'))
        assert accepts(backend.compile(Structured("json_object", whitespace="_*")), cut('{"a":__1}'))

    def test_control_tokens_in_tags_are_tokens(self) -> None:
        """A tag that begins with the text of a control token begins with that token."""
        tag = {"type": "tag", "begin": "<call>f", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": ""}
        matcher = self.backend().compile(Structured("structural_tag", json.dumps({"format": tag})))
        assert allowed(matcher) == {TABLE.special["<call>"]}
        assert accepts(matcher, [TABLE.special["<call>"], *cut('f{"color":"red","ok":true}'), END])

    @pytest.mark.parametrize(
        "bad",
        [
            Structured("json_schema", '{"type": "objectt"}'),
            Structured("json_schema", "{"),
            Structured("json_schema", '"string"'),
            Structured("regex", "(a"),
            Structured("grammar", "root ::= ("),
            Structured("grammar", "start: nothing"),
            Structured("structural_tag", "{}"),
            Structured("structural_tag", '{"format": {"type": "no such type"}}'),
        ],
        ids=lambda bad: f"{bad.kind}: {bad.value}",
    )
    def test_what_is_malformed_is_refused_with_a_reason(self, bad: Structured) -> None:
        """In one line that a client can read."""
        with pytest.raises(ValueError, match=r"\w+") as caught:
            self.backend().compile(bad)
        assert "\n" not in str(caught.value)


__all__ = ["BAD", "GOOD", "SPECS", "GrammarConformance", "accepts", "allowed", "cut", "toy_table"]
