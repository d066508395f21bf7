"""Validation of plain data by a pydantic model, with errors that name file, line, key, value and what was expected."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from engine.config.origins import Key, Origins, dotted
from engine.config.secrets import expand_all
from engine.config.shape import is_secret, model_of, type_at
from engine.discovery import nearest
from engine.errors import ConfigError

M = TypeVar("M", bound=BaseModel)


def validated(model: type[M], data: Any, origins: Origins, at: Key, environ: Mapping[str, str]) -> M:
    """`data`, which stands at `at` of the whole tree, as an instance of `model`; `${NAME}` in secrets is expanded.

    Raises:
        ConfigError: with one line per problem.
    """
    if not isinstance(data, dict):
        raise ConfigError(f"{origins.near(at)}{dotted(at)} is {_shown(data)}, expected a mapping of keys to values")
    expanded = expand_all(model, data, origins, at, environ)
    try:
        return model.model_validate(expanded)
    except ValidationError as error:
        raise ConfigError("\n".join(_sentences(model, error, origins, at))) from None


def _sentences(model: type[BaseModel], error: ValidationError, origins: Origins, at: Key) -> Iterator[str]:
    for problem in error.errors(include_url=False):
        inner: Key = problem["loc"]
        key = at + inner
        yield f"{origins.near(key)}{dotted(key)} {_complaint(model, inner, dict(problem))}"


def _complaint(model: type[BaseModel], key: Key, problem: dict[str, Any]) -> str:
    if problem["type"] == "extra_forbidden":
        section = model_of(type_at(model, key[:-1]))
        known = list(section.model_fields) if section else []
        return f"is no known key{nearest(str(key[-1]), known)} (known here: {', '.join(known) or 'none'})"
    if problem["type"] == "missing":
        return "is missing"
    value = "hidden" if is_secret(model, key) else _shown(problem["input"])
    text: str = problem["msg"]
    for prefix in ("Value error, ", "Input should be "):
        text = text.removeprefix(prefix)
    if text.startswith(("less than", "greater than")):
        text = f"a number {text}"
    return f"is {value}, {text if text.startswith('expected') else f'expected {text}'}"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


__all__ = ["validated"]
