"""From what the model writes to the content blocks of a message, each step of which is told as an event.

A block is open while text for it comes; whatever belongs to another block closes it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import msgspec

Event = dict[str, Any]


class BlockWriter:
    """The content of one message."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []
        self._open = False  # whether the last block may get more
        self._arguments: list[str] = []  # of the open call

    def text(self, text: str) -> Iterator[Event]:
        """More of the answer proper."""
        yield from self._add("text", {"type": "text", "text": ""}, "text", "text_delta", text)

    def thinking(self, text: str) -> Iterator[Event]:
        """More of the thoughts. They carry no signature: nothing here checks one."""
        block = {"type": "thinking", "thinking": "", "signature": ""}
        yield from self._add("thinking", block, "thinking", "thinking_delta", text)

    def call(self, call_id: str, name: str) -> Iterator[Event]:
        """A call of a tool begins."""
        yield from self.close()
        yield self._begin({"type": "tool_use", "id": call_id or f"toolu_{uuid.uuid4().hex}", "name": name, "input": {}})

    def arguments(self, text: str) -> Iterator[Event]:
        """More of the arguments of the call that began last."""
        self._arguments.append(text)
        yield self._delta({"type": "input_json_delta", "partial_json": text})

    def close(self) -> Iterator[Event]:
        """Nothing more comes for the open block, if there is one."""
        if not self._open:
            return
        self._open = False
        if self.blocks[-1]["type"] == "tool_use":
            self.blocks[-1]["input"] = _object("".join(self._arguments))
            self._arguments.clear()
        yield {"type": "content_block_stop", "index": len(self.blocks) - 1}

    def _add(self, kind: str, block: dict[str, Any], name: str, delta: str, text: str) -> Iterator[Event]:
        if not self._open or self.blocks[-1]["type"] != kind:
            yield from self.close()
            yield self._begin(block)
        self.blocks[-1][name] += text
        yield self._delta({"type": delta, name: text})

    def _begin(self, block: dict[str, Any]) -> Event:
        self._open = True
        self.blocks.append(block)
        return {"type": "content_block_start", "index": len(self.blocks) - 1, "content_block": dict(block)}

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self.blocks) - 1, "delta": delta}


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call. Text that is no object (the model broke off, say) is kept as Anthropic advises."""
    try:
        found = msgspec.json.decode(text) if text.strip() else {}
    except (msgspec.MsgspecError, RecursionError):
        found = None
    return found if isinstance(found, dict) else {"INVALID_JSON": text}


__all__ = ["BlockWriter", "Event"]
