"""The JSON Schema of the whole tree, the options of every installed component included; editors check YAML with it."""

from __future__ import annotations

from typing import Any

from engine.config.components import OPTIONAL, PLACES
from engine.config.model import EngineConfig
from engine.config.origins import Key
from engine.registry import Owned, Registry

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def json_schema(registry: Registry) -> dict[str, Any]:
    """A draft 2020-12 schema; a component may be a name, or a section whose options depend on the name."""
    schema = EngineConfig.model_json_schema()
    definitions: dict[str, Any] = schema["$defs"]
    for key, point in PLACES.items():
        holder = _holder(schema, key)
        wanted = holder["properties"][key[-1]]
        owned = registry.offers(point)
        if wanted.get("type") == "array":
            wanted["items"] = _component(wanted["items"], point, owned, definitions, ("auto",))
        else:
            names = ("none", "auto") if point in OPTIONAL else ("auto",)
            holder["properties"][key[-1]] = _component(wanted, point, owned, definitions, names)
    return {"$schema": _DIALECT, **schema}


def _holder(schema: dict[str, Any], key: Key) -> dict[str, Any]:
    """The object schema that has the last part of `key` as a property."""
    here = schema
    for part in key[:-1]:
        reference: str = here["properties"][part]["$ref"]
        here = schema["$defs"][reference.rpartition("/")[2]]
    return here


def _component(
    section: dict[str, Any],
    point: str,
    owned: tuple[Owned[Any], ...],
    definitions: dict[str, Any],
    names: tuple[str, ...],
) -> dict[str, Any]:
    """The schema of one component: a name, or its section with the options that belong to the name."""
    known = [*names, *(o.offer.name for o in owned)]
    cases = [_case(point, o, definitions) for o in owned]
    about = {word: section[word] for word in ("description", "default") if word in section}
    reference = {"$ref": section["$ref"]}
    return about | {
        "anyOf": [
            {"type": "string", "enum": known},
            {"allOf": [reference, {"properties": {"use": {"enum": known}}}, *cases]},
        ]
    }


def _case(point: str, owned: Owned[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    name = owned.offer.name
    prefix = f"{point}.{name}"
    options = owned.offer.options.model_json_schema(ref_template=f"#/$defs/{prefix}.{{model}}")
    for inner, definition in options.pop("$defs", {}).items():
        definitions[f"{prefix}.{inner}"] = definition
    definitions[prefix] = options
    return {
        "if": {"properties": {"use": {"const": name}}, "required": ["use"]},
        "then": {"properties": {"options": {"$ref": f"#/$defs/{prefix}"}}},
    }


__all__ = ["json_schema"]
