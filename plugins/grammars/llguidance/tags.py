"""Structural tags: free text in which some pieces have a form. Written as one Lark grammar with side grammars.

Every part is written together with the fixed text that follows it, since free text must know where it ends: it becomes
a lazy lexeme, which stops at the first occurrence. Control tokens in fixed text become tokens by id, because the bytes
of text never spell them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.plugins.grammars.llguidance.bodies import from_grammar, from_regex, guided

Format = Mapping[str, Any]

_TEXT = "TEXT"


class TagWriter:
    """Writes one grammar.

    Args:
        special: control tokens by their text.
        rules: how JSON is written, as llguidance's `x-guidance` says.
    """

    def __init__(self, special: Mapping[str, int], rules: Mapping[str, Any]) -> None:
        self._special, self._rules = special, rules
        self._splitter = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or r"(?!)")
        self._lines = ["TEXT: /(.|\\n)*/"]
        self._side: list[dict[str, Any]] = []
        self._writers: dict[str, Callable[[Format, str], str]] = {
            "const_string": lambda f, end: self._fixed(_string(f, "value") + end),
            "json_schema": lambda f, end: f"{self._json(_get(f, 'json_schema'))} {self._fixed(end)}",
            "regex": lambda f, end: (
                f"{self._beside(lark_grammar=from_regex(_string(f, 'pattern')))} {self._fixed(end)}"
            ),
            "grammar": lambda f, end: (
                f"{self._beside(lark_grammar=from_grammar(_string(f, 'grammar')))} {self._fixed(end)}"
            ),
            "any_text": lambda f, end: self._until(end),
            "tag": self._tag,
            "sequence": self._sequence,
            "or": self._alternatives,
            "triggered_tags": self._triggered,
            "tags_with_separator": self._separated,
        }

    def grammar(self, tag: Any) -> tuple[str, list[dict[str, Any]]]:
        """Lark for a whole structural tag (`{format}`, or the older `{structures, triggers}`), and what it refers to.

        Raises:
            ValueError: it is malformed or of a type that isn't known.
        """
        if not isinstance(tag, Mapping):
            raise ValueError("a structural tag must be an object")
        start = self._write(_older(tag) if "structures" in tag else _get(tag, "format"), "")
        return "\n".join([f"start: {start}", *self._lines]), self._side

    def _write(self, part: Any, end: str) -> str:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if not isinstance(kind, str) or kind not in self._writers:
            raise ValueError(
                f"a structural tag has no format of type {kind!r}; there are {', '.join(sorted(self._writers))}"
            )
        return f"({self._writers[kind](part, end)})"

    # Fixed text, free text, and what has a form

    def _fixed(self, text: str) -> str:
        """Literals and control tokens, in order."""
        parts, at = [], 0
        for found in self._splitter.finditer(text):
            parts += [_literal(text[at : found.start()]), f"<[{self._special[found[0]]}]>"]
            at = found.end()
        return " ".join(part for part in [*parts, _literal(text[at:])] if part) or '""'

    def _until(self, end: str) -> str:
        """Free text up to and including the first `end`; to the end of everything if there is none."""
        if not end:
            return _TEXT
        found = self._splitter.search(end)
        head = end[: found.start()] if found else end
        if not head:
            return f"{_TEXT} {self._fixed(end)}"
        name = f"until_{len(self._lines)}"
        self._lines.append(f"{name}[lazy]: {_TEXT} {_literal(head)}")
        return f"{name} {self._fixed(end[len(head) :])}"

    def _json(self, schema: Any) -> str:
        if not isinstance(schema, Mapping | bool):
            raise ValueError("a schema in a structural tag must be an object or a boolean")
        return self._beside(json_schema=guided(schema, self._rules))

    def _lark(self, text: str) -> str:
        return self._beside(lark_grammar=text)

    def _beside(self, **grammar: Any) -> str:
        name = f"side_{len(self._side)}"
        self._side.append({"name": name, **grammar})
        return f"@{name}"

    # What is made of parts

    def _tag(self, part: Format, end: str) -> str:
        return f"{self._fixed(_string(part, 'begin'))} {self._inside(part, end)}"

    def _inside(self, tag: Format, end: str) -> str:
        return self._write(_get(tag, "content"), _string(tag, "end") + end)

    def _sequence(self, part: Format, end: str) -> str:
        elements, written = list(_list(part, "elements")), []
        while elements:
            element = elements.pop(0)
            if _is_open(element) and elements:
                follower = elements.pop(0)
                written.append(self._before(element, follower, "" if elements else end))
            else:
                written.append(self._write(element, "" if elements else end))
        return " ".join(written)

    def _before(self, free: Format, follower: Any, end: str) -> str:
        """Something with free text at its end, and the element behind it, whose beginning must be fixed."""
        kind = follower.get("type") if isinstance(follower, Mapping) else None
        if kind == "const_string":
            return self._write(free, _string(follower, "value") + end)
        if kind == "tag":
            return f"{self._write(free, _string(follower, 'begin'))} {self._inside(follower, end)}"
        raise ValueError(
            f"in a structural tag, {free['type']} must be last or be followed by a const_string or tag, not {kind!r}"
        )

    def _alternatives(self, part: Format, end: str) -> str:
        return " | ".join(self._write(element, end) for element in _list(part, "elements"))

    def _triggered(self, part: Format, end: str) -> str:
        triggers = [str(trigger) for trigger in _list(part, "triggers")]
        groups: dict[str, list[str]] = {}
        for tag in _list(part, "tags"):
            begin = _string(tag, "begin")
            trigger = next((t for t in triggers if t and begin.startswith(t)), None)
            if trigger is None:
                raise ValueError(f"in a structural tag, no trigger begins {begin!r}; the triggers are {triggers}")
            rest = f"{self._fixed(begin[len(trigger) :])} {self._inside(tag, '')}"
            groups.setdefault(trigger, []).append(rest)
        tags = " | ".join(f"{self._until(trigger)} ({' | '.join(rests)})" for trigger, rests in groups.items())
        if part.get("stop_after_first"):
            once = f"({tags}) {self._fixed(end)}"
            return once if part.get("at_least_one") else f"{once} | {self._until(end)}"
        return f"({tags}){'+' if part.get('at_least_one') else '*'} {self._until(end)}"

    def _separated(self, part: Format, end: str) -> str:
        tags = " | ".join(self._tag(tag, "") for tag in _list(part, "tags"))
        more = "" if part.get("stop_after_first") else f"({self._fixed(_string(part, 'separator'))} ({tags}))*"
        listed = f"({tags}) {more}"
        return f"{listed if part.get('at_least_one') else f'({listed})?'} {self._fixed(end)}"


def _older(tag: Format) -> Format:
    """`{structures: [{begin, schema, end}], triggers}` in today's words."""
    tags = [
        {
            "begin": _string(s, "begin"),
            "content": {"type": "json_schema", "json_schema": s.get("schema", True)},
            "end": _string(s, "end"),
        }
        for s in _list(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": _list(tag, "triggers"), "tags": tags}


def _is_open(part: Any) -> bool:
    """Whether a format can end with free text."""
    return isinstance(part, Mapping) and part.get("type") in ("any_text", "triggered_tags")


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""


def _get(part: Any, key: str) -> Any:
    if not isinstance(part, Mapping) or key not in part:
        raise ValueError(f"a part of the structural tag lacks {key!r}")
    return part[key]


def _string(part: Any, key: str) -> str:
    value = _get(part, key)
    if not isinstance(value, str):
        raise ValueError(f"in a structural tag, {key!r} must be a string")
    return value


def _list(part: Any, key: str) -> Sequence[Any]:
    value = _get(part, key)
    if not isinstance(value, list) or not value:
        raise ValueError(f"in a structural tag, {key!r} must be a list that is not empty")
    return value


__all__ = ["TagWriter"]
