"""The table of every key of the YAML tree, for people: Markdown, made from the models so that it can't go stale."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from engine.config.model import EngineConfig
from engine.config.origins import dotted
from engine.config.shape import bare, fields
from engine.plugin import Options
from engine.registry import Registry, noun
from engine.specs import POINTS

_WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", SecretStr: "secret text"}


def markdown(registry: Registry) -> str:
    """One table per section of the tree, then one per installed component that has options."""
    return "\n".join([*_frame(EngineConfig), *_components(registry)])


def table(model: type[BaseModel]) -> str:
    """One table of the keys of another tree, such as the router's."""
    return "\n".join(_rows((dotted(key), field) for key, field in fields(model)))


def option_rows(model: type[Options]) -> Iterator[tuple[str, str, str, str]]:
    """Key, type, default and description of each option of a component."""
    for key, field in fields(model):
        yield dotted(key), type_words(field.annotation), default_words(field), field.description or ""


def _frame(model: type[BaseModel]) -> Iterator[str]:
    for section, rows in groupby(fields(model), key=lambda item: item[0][0]):
        yield from _table(f"### `{section}`", ((dotted(k), f) for k, f in rows))


def _components(registry: Registry) -> Iterator[str]:
    for point in POINTS:
        for owned in registry.offers(point.HOOK):
            if owned.offer.options.model_fields:
                rows = ((dotted(k), f) for k, f in fields(owned.offer.options))
                yield from _table(f"### {noun(point.HOOK)} `{owned.offer.name}`", rows)


def _table(heading: str, rows: Iterator[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield from (heading, "", *_rows(rows), "")


def _rows(rows: Iterator[tuple[str, FieldInfo]]) -> Iterator[str]:
    yield from ("| key | type | default | meaning |", "|---|---|---|---|")
    for key, field in rows:
        meaning = (field.description or "").replace("|", r"\|")
        yield f"| `{key}` | {type_words(field.annotation)} | {default_words(field)} | {meaning} |"


def type_words(annotation: Any) -> str:
    """A type as people say it: `whole number`, `list of text`, `auto, cpu or cuda`."""
    inner = bare(annotation)
    origin, arguments = get_origin(inner), get_args(inner)
    if origin is list:
        return f"list of {type_words(arguments[0])}"
    if origin is dict:
        return "mapping"
    if arguments and all(isinstance(a, str) for a in arguments):  # a Literal
        return ", ".join(arguments[:-1]) + f" or {arguments[-1]}" if len(arguments) > 1 else str(arguments[0])
    if arguments:  # a union
        return " or ".join(type_words(a) for a in arguments if a is not type(None))
    return _WORDS.get(inner, getattr(inner, "__name__", str(inner)))


def default_words(field: FieldInfo) -> str:
    """The default as YAML would spell it; `unset` for none, `required` when there is no default."""
    default = field.get_default(call_default_factory=True, validated_data={})
    if default is PydanticUndefined:
        return "required"
    return "unset" if default is None else f"`{json.dumps(default, ensure_ascii=False, default=str)}`"


__all__ = ["default_words", "markdown", "option_rows", "table", "type_words"]
