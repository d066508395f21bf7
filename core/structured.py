"""What the text of a request must look like. Made on the HTTP side, sent with the sampling parameters, and compiled in
the core by the grammar component. Imports no torch."""

from __future__ import annotations

import json
from typing import Any, Literal, Self

import msgspec

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "structural_tag"]


class Structured(msgspec.Struct, frozen=True, omit_defaults=True):
    """One constraint. Hashable: equal ones are compiled once.

    `value` by kind: `json_object` none; `json_schema` the schema as JSON text; `regex` the pattern, which the whole
    text must match; `choice` the texts to choose from; `grammar` a grammar in the syntax of Lark or GBNF (`::=`), whose
    start rule is `start` or `root`; `structural_tag` a format as JSON text (see docs/structured-output.md).

    Raises:
        ValueError: the value is not of the type that the kind has; the sentence begins with `structured`.
    """

    kind: Kind
    value: str | tuple[str, ...] = ""
    whitespace: str | None = None  # regex of what may stand between the tokens of JSON; None: the component's default
    after: str = ""  # the constraint begins behind this text; everything before it is free. Empty: at once

    def __post_init__(self) -> None:
        if self.kind == "choice":
            if not isinstance(self.value, tuple) or not self.value or not all(self.value):
                raise ValueError("structured.value must be a list of texts that are not empty for the kind choice")
        elif not isinstance(self.value, str) or not (self.value or self.kind == "json_object"):
            raise ValueError(f"structured.value must be a text that is not empty for the kind {self.kind}")

    @classmethod
    def schema(cls, schema: dict[str, Any] | bool, **more: Any) -> Self:
        """JSON that is valid under a schema; `more` are further fields."""
        return cls("json_schema", json.dumps(schema), **more)


__all__ = ["Kind", "Structured"]
