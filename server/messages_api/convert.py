"""From a request of the Messages API to the chat request that computes it."""

from __future__ import annotations

from typing import Any

import msgspec

from engine.server.errors import bad_request
from engine.server.messages_api.protocol import (
    Conversation,
    MessagesRequest,
    OutputConfig,
    Thinking,
    Tool,
    ToolChoice,
)
from engine.server.protocol import ChatRequest

_SAME = sorted(
    set(MessagesRequest.__struct_fields__)
    & set(ChatRequest.__struct_fields__) - {"messages", "tools", "tool_choice", "stream", "chat_template_kwargs"}
)


def chat_request(body: Conversation) -> ChatRequest:
    """The same request for chat.

    Raises:
        ApiError: 400, naming the field that is malformed or asks for what doesn't exist here.
    """
    made = ChatRequest(
        messages=_messages(body),
        tools=[_tool(tool, f"tools[{i}]") for i, tool in enumerate(body.tools or ())] or None,
        **{name: getattr(body, name) for name in _SAME if hasattr(body, name)},
    )
    if body.tool_choice is not None:
        made.tool_choice = _choice(body.tool_choice)
        made.parallel_tool_calls = not body.tool_choice.disable_parallel_tool_use
    output = body.output_config or OutputConfig()
    made.reasoning_effort = output.effort
    made.response_format = _format(output.format or body.output_format)
    if isinstance(body, MessagesRequest):
        made.stop = body.stop_sequences
        made.chat_template_kwargs = body.chat_template_kwargs
        _continue(made)
    if body.thinking is not None and (thinking := _thinking(body.thinking)) is not None:
        made.chat_template_kwargs = {"enable_thinking": thinking, **(made.chat_template_kwargs or {})}
    return made


def _continue(made: ChatRequest) -> None:
    """Words of the assistant at the end are the beginning of its answer."""
    last = made.messages[-1]
    if last["role"] == "assistant" and last["content"] is not None and "tool_calls" not in last:
        made.continue_final_message = True


def _messages(body: Conversation) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    if body.system:
        made.append({"role": "system", "content": body.system})
    names: dict[str, str] = {}  # of tools by the id of the call
    for i, message in enumerate(body.messages):
        role, content, where = message.role, message.content, f"messages[{i}]"
        if role == "assistant":
            made.append(_assistant(content, where, names))
        elif role in ("user", "system"):
            made += _user(role, content, where, names)
        else:
            raise bad_request(f"{where}.role must be 'user' or 'assistant', not {role!r}", f"{where}.role")
    if not body.messages:
        raise bad_request("messages must hold at least one message", "messages")
    return made


def _blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _assistant(content: str | list[dict[str, Any]], where: str, names: dict[str, str]) -> dict[str, Any]:
    made: dict[str, Any] = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for i, block in enumerate(_blocks(content)):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                texts.append(_string(block, "text", place))
            case "thinking":
                thoughts.append(_string(block, "thinking", place))
            case "redacted_thinking":
                continue  # made elsewhere, and unreadable here
            case "tool_use":
                call_id, name = _string(block, "id", place), _string(block, "name", place)
                names[call_id] = name
                arguments = msgspec.json.encode(block.get("input") or {}).decode()
                calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})
            case kind:
                raise bad_request(f"{place}.type must be text, thinking or tool_use, not {kind!r}", f"{place}.type")
    if texts:
        made["content"] = "".join(texts)
    if thoughts:
        made["reasoning_content"] = "".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return made


def _user(role: str, content: str | list[dict[str, Any]], where: str, names: dict[str, str]) -> list[dict[str, Any]]:
    """The results of tools, each a message of its own for chat, then what the user says."""
    results, parts = [], []
    for i, block in enumerate(_blocks(content)):
        place = f"{where}.content[{i}]"
        match block.get("type"):
            case "text":
                parts.append({"type": "text", "text": _string(block, "text", place)})
            case "tool_result":
                call_id = _string(block, "tool_use_id", place)
                result = {"role": "tool", "tool_call_id": call_id, "content": block.get("content") or ""}
                results.append({**result, "name": names[call_id]} if call_id in names else result)
            case "image" | "document":
                raise bad_request(f"{place} is of type {block['type']!r}, but this model reads text only", place)
            case kind:
                raise bad_request(f"{place}.type must be text or tool_result, not {kind!r}", f"{place}.type")
    return [*results, {"role": role, "content": parts}] if parts or not results else results


def _string(block: dict[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise bad_request(f"{where}.{name} must be a string", f"{where}.{name}")
    return value


def _tool(tool: Tool, where: str) -> dict[str, Any]:
    if tool.type not in (None, "custom"):
        raise bad_request(f"{where} is of type {tool.type!r}, but tools that a server runs do not exist here", where)
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str | dict[str, Any]:
    match choice.type:
        case "auto" | "none" as same:
            return same
        case "any":
            return "required"
        case "tool":
            return {"type": "function", "function": {"name": choice.name}}
        case kind:
            raise bad_request(f"tool_choice.type must be auto, any, tool or none, not {kind!r}", "tool_choice.type")


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None:
        return None
    if given.get("type") != "json_schema" or not isinstance(given.get("schema"), dict):
        raise bad_request("output_config.format must have type 'json_schema' and an object `schema`", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": given["schema"], "strict": True}}


def _thinking(thinking: Thinking) -> bool | None:
    """Whether the template should let the model think; None leaves it to the template."""
    match thinking.type:
        case "enabled":
            return True
        case "disabled":
            return False
        case "adaptive":
            return None
        case kind:
            raise bad_request(f"thinking.type must be enabled, disabled or adaptive, not {kind!r}", "thinking.type")


__all__ = ["chat_request"]
