"""Items of a conversation, as the Responses API writes them, to chat messages.

What the model wrote in one turn comes as several items (reasoning, text, calls); here they become one message again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.server.errors import bad_request

_INSTRUCTING = ("system", "developer")


def messages(instructions: str | None, items: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation as chat messages; what instructs the model at its beginning is one system message.

    Raises:
        ApiError: 400, naming the item that is malformed or of a kind that doesn't exist here.
    """
    turns = _Turns()
    for i, item in enumerate(items):
        turns.take(item, f"input[{i}]")
    return _one_system_message(instructions, turns.messages)


class _Turns:
    """Messages as they grow; the model's items gather in the last one."""

    def __init__(self) -> None:
        self.messages: list[dict[str, Any]] = []
        self._names: dict[str, str] = {}  # of functions by call id, which templates ask for beside a result

    def take(self, item: dict[str, Any], where: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, where)
            case "reasoning":
                self._assistant(bare=True)["reasoning_content"] = _reasoning(item, where)
            case "function_call":
                self._call(item, where)
            case "function_call_output":
                self._result(item, where)
            case "item_reference":
                raise bad_request(
                    f"{where} refers to an item that is not kept; send the item itself, or previous_response_id", where
                )
            case kind:
                raise bad_request(
                    f"{where}.type must be message, function_call, function_call_output or reasoning, not {kind!r}",
                    f"{where}.type",
                )

    def _message(self, item: dict[str, Any], where: str) -> None:
        role, content = item.get("role"), item.get("content")
        if content is None:
            raise bad_request(f"{where}.content is required", f"{where}.content")
        if role == "assistant":
            self._assistant(bare=True)["content"] = content
        else:
            self.messages.append({"role": role, "content": content})

    def _call(self, item: dict[str, Any], where: str) -> None:
        call_id, name = _text(item, "call_id", where), _text(item, "name", where)
        self._names[call_id] = name
        function = {"name": name, "arguments": _text(item, "arguments", where)}
        calls = self._assistant(bare=False).setdefault("tool_calls", [])
        calls.append({"id": call_id, "type": "function", "function": function})

    def _result(self, item: dict[str, Any], where: str) -> None:
        call_id = _text(item, "call_id", where)
        output = item.get("output")
        if not isinstance(output, str | list):
            raise bad_request(f"{where}.output must be a string or a list of parts", f"{where}.output")
        message = {"role": "tool", "tool_call_id": call_id, "content": output}
        if call_id in self._names:
            message["name"] = self._names[call_id]
        self.messages.append(message)

    def _assistant(self, *, bare: bool) -> dict[str, Any]:
        """The model's message under way, or a new one; `bare` asks for one without text and calls."""
        last = self.messages[-1] if self.messages else None
        if (
            last is None
            or last["role"] != "assistant"
            or (bare and (last["content"] is not None or "tool_calls" in last))
        ):
            last = {"role": "assistant", "content": None}
            self.messages.append(last)
        return last


def _reasoning(item: dict[str, Any], where: str) -> str:
    parts = item.get("content") or item.get("summary") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise bad_request(f"{where}.content must be a list of parts", f"{where}.content")
    return "\n".join(str(part.get("text", "")) for part in parts)


def _text(item: dict[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", f"{where}.{name}")
    return value


def _one_system_message(instructions: str | None, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Most templates take one system message, and only at the beginning."""
    count = next((i for i, turn in enumerate(turns) if turn["role"] not in _INSTRUCTING), len(turns))
    head = [{"type": "text", "text": instructions}] if instructions else []
    for turn in turns[:count]:
        content = turn["content"]
        head += content if isinstance(content, list) else [{"type": "text", "text": content}]
    if not head:
        return turns
    return [{"role": "system", "content": head}, *turns[count:]]


__all__ = ["messages"]
