"""The shape of a tree of pydantic models: what type stands at a key, and which keys there are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from engine.config.origins import Key


def bare(annotation: Any) -> Any:
    """The type without `Annotated` and without `| None`; any other union stays as it is."""
    if get_origin(annotation) is Annotated:
        return bare(get_args(annotation)[0])
    members = [a for a in get_args(annotation) if a is not type(None)]
    if type(None) in get_args(annotation) and len(members) == 1:
        return bare(members[0])
    return annotation


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The model that `annotation` is or allows; None when there is none."""
    inner = bare(annotation)
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def type_at(model: type[BaseModel], key: Key) -> Any:
    """The type at `key`, bare; None where the models say nothing (unknown keys, raw options)."""
    here: Any = model
    for part in key:
        if (inside := model_of(here)) and part in inside.model_fields:
            here = inside.model_fields[str(part)].annotation
        elif isinstance(part, int) and get_origin(bare(here)) is list:
            (here,) = get_args(bare(here))
        elif get_origin(bare(here)) is dict:
            _, here = get_args(bare(here))
            if here is Any:  # the options of a component: their own model knows
                return None
        else:
            return None
    return bare(here)


def is_secret(model: type[BaseModel], key: Key) -> bool:
    """Whether a secret, or a list of secrets, stands at `key`; a section counts if it may be written as a secret."""
    found = type_at(model, key)
    return _secret(bare(get_args(found)[0]) if get_origin(found) is list else found)


def _secret(annotation: Any) -> bool:
    section = model_of(annotation)
    if section is None:
        return annotation is SecretStr
    short = section.model_fields.get(getattr(section, "shorthand", ""))
    return short is not None and bare(short.annotation) is SecretStr


def fields(model: type[BaseModel], key: Key = ()) -> Iterator[tuple[Key, FieldInfo]]:
    """Every key of the tree that is no section, in order, with its field; items of a list stand under `*`."""
    for name, field in model.model_fields.items():
        inner = bare(field.annotation)
        if get_origin(inner) is list and (item := model_of(get_args(inner)[0])):
            yield from fields(item, (*key, name, "*"))
        elif section := model_of(inner):
            yield from fields(section, (*key, name))
        else:
            yield (*key, name), field


__all__ = ["bare", "fields", "is_secret", "model_of", "type_at"]
