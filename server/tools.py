"""Which functions a request offers to the model, which it must call, and the constraint that makes it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.server.errors import bad_request
from engine.specs.tool_parser import ToolFormat
from engine.structured import Structured

Tool = Mapping[str, Any]

_NO_ARGUMENTS = {"type": "object", "properties": {}, "additionalProperties": False}
"""OpenAI: a function without parameters takes none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """What a request wants of its tools. `tool_choice` has been checked against them."""

    tools: Sequence[Tool] = ()
    active: bool = False  # whether calls may come at all
    forced: str | None = None  # the one function that must be called, once
    required: bool = False  # at least one call of any function
    parallel: bool = True
    shown: list[dict[str, Any]] | None = field(default=None)  # what the chat template tells the model

    @property
    def functions(self) -> frozenset[str]:
        """The names that may be called."""
        return frozenset(tool["function"]["name"] for tool in self.tools)

    @property
    def constrained(self) -> bool:
        """Whether the answer can be nothing but calls."""
        return self.forced is not None or self.required

    def structured(self, form: ToolFormat | None) -> Structured | None:
        """What makes the answer keep to it; None when the model is free.

        A forced answer is plain JSON, whatever the model's own format is: the arguments of the one function, or a list
        of `{"name", "arguments"}`. Otherwise only functions that ask for `strict` are held to their schema, if the
        model's format lets constraints be attached.
        """
        if self.forced is not None:
            return Structured.schema(next(_schema(t) for t in self.tools if t["function"]["name"] == self.forced))
        if self.required:
            return Structured.schema(self._list_schema())
        strict = any(tool["function"].get("strict") for tool in self.tools)
        return self._strict(form) if strict and self.active and form is not None else None

    def _list_schema(self) -> dict[str, Any]:
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"const": tool["function"]["name"]},
                    "arguments": _moved(_schema(tool), f"#/items/anyOf/{i}/properties/arguments"),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
            for i, tool in enumerate(self.tools)
        ]
        most = {} if self.parallel else {"maxItems": 1}
        return {"type": "array", "minItems": 1, **most, "items": {"anyOf": calls}}

    def _strict(self, form: ToolFormat) -> Structured | None:
        """Free text in which calls keep to the schemas of functions that are strict."""
        tags = [(tool, form.tag(tool["function"]["name"])) for tool in self.tools]
        found = [
            {
                "type": "tag",
                "begin": tag.begin,
                "content": {"type": "json_schema", "json_schema": _held(tool)},
                "end": tag.end,
            }
            for tool, tag in tags
            if tag is not None
        ]
        triggers = sorted({tag.trigger for _, tag in tags if tag is not None})
        if not found:
            return None
        form_text = {"type": "triggered_tags", "triggers": triggers, "tags": found}
        return Structured("structural_tag", json.dumps({"format": form_text}))


def _schema(tool: Tool) -> dict[str, Any]:
    parameters: dict[str, Any] = tool["function"].get("parameters") or _NO_ARGUMENTS
    return parameters if "type" in parameters else {"type": "object", **parameters}


def _held(tool: Tool) -> dict[str, Any]:
    return _schema(tool) if tool["function"].get("strict") else {"type": "object"}


def _moved(schema: Any, root: str) -> Any:
    """The schema as part of another one: references to its own root lead to its new place."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: _moved(value, root) for key, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        made["$ref"] = root + reference[1:]
    return made


def tool_use(
    tools: Sequence[dict[str, Any]] | None, choice: str | dict[str, Any] | None, parallel: bool | None = None
) -> ToolUse:
    """Check the tools and what is to be done with them.

    Raises:
        ApiError: 400 for a malformed tool, or a choice that is malformed or names no tool.
    """
    offered = list(tools or [])
    names = [_tool_name(tool, f"tools[{i}]") for i, tool in enumerate(offered)]
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        offered, choice = _allowed(offered, names, choice)
    use = ToolUse(tools=offered, active=True, shown=offered, parallel=parallel is not False)
    if isinstance(choice, dict):
        return replace(use, forced=_chosen(choice, names, "tool_choice"))
    if choice not in (None, "none", "auto", "required"):
        raise bad_request(
            f"tool_choice must be 'none', 'auto', 'required' or name a function, not {choice!r}", "tool_choice"
        )
    if choice == "required" and not offered:
        raise bad_request("tool_choice 'required' needs tools", "tool_choice")
    if not offered or choice == "none":
        return ToolUse()
    return replace(use, required=choice == "required")


def _allowed(
    tools: list[dict[str, Any]], names: list[str], choice: dict[str, Any]
) -> tuple[list[dict[str, Any]], str | dict[str, Any]]:
    """`{"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}`: some of the tools, and auto or required."""
    inner = choice.get("allowed_tools")
    listed = inner.get("tools") if isinstance(inner, dict) else None
    if not isinstance(inner, dict) or not isinstance(listed, list) or inner.get("mode") not in ("auto", "required"):
        raise bad_request("tool_choice.allowed_tools needs a mode (auto or required) and a list tools", "tool_choice")
    kept = {_chosen(tool if isinstance(tool, dict) else {}, names, "tool_choice.allowed_tools") for tool in listed}
    return [tool for tool, name in zip(tools, names, strict=True) if name in kept], str(inner["mode"])


def _chosen(choice: dict[str, Any], names: list[str], where: str) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise bad_request(f"{where} must be 'none', 'auto', 'required' or name a function", "tool_choice")
    if name not in names:
        raise bad_request(f"{where} names {name!r}, but tools has {names}", "tool_choice")
    return name


def _tool_name(tool: dict[str, Any], where: str) -> str:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, dict):
        raise bad_request(f"{where} must have type 'function' and an object `function`", where)
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise bad_request(f"{where}.function.name must be a non-empty string", where)
    if not isinstance(function.get("parameters"), dict | None):
        raise bad_request(f"{where}.function.parameters must be an object (a JSON schema)", where)
    if not isinstance(function.get("strict"), bool | None):
        raise bad_request(f"{where}.function.strict must be true or false", where)
    return name


__all__ = ["Tool", "ToolUse", "tool_use"]
