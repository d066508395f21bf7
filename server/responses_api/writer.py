"""From what the model writes to the items of a response, each step of which is told as an event.

An item is open while text for it comes; whatever belongs to another item closes it. Events are `(type, fields)`,
without their sequence numbers; they are to be written before the next one is asked for.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

Event = tuple[str, dict[str, Any]]


class ItemWriter:
    """The output of one response."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._open = False  # whether the last item may get more

    def text(self, text: str, logprobs: list[dict[str, Any]]) -> Iterator[Event]:
        """More of the answer proper."""
        if not self._continues("message"):
            yield from self.close()
            item = {"type": "message", "id": _name("msg"), "status": "in_progress", "role": "assistant", "content": []}
            yield from self._begin(item, {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        part = self.items[-1]["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        yield "response.output_text.delta", {**self._place(), "content_index": 0, "delta": text, "logprobs": logprobs}

    def reasoning(self, text: str) -> Iterator[Event]:
        """More of the thoughts."""
        if not self._continues("reasoning"):
            yield from self.close()
            item = {"type": "reasoning", "id": _name("rs"), "status": "in_progress", "summary": [], "content": []}
            yield from self._begin(item, {"type": "reasoning_text", "text": ""})
        self.items[-1]["content"][0]["text"] += text
        yield "response.reasoning_text.delta", {**self._place(), "content_index": 0, "delta": text}

    def call(self, call_id: str, name: str) -> Iterator[Event]:
        """A call of a function begins."""
        yield from self.close()
        item = {"type": "function_call", "id": _name("fc"), "call_id": call_id, "name": name, "arguments": ""}
        yield from self._begin({**item, "status": "in_progress"}, None)

    def arguments(self, text: str) -> Iterator[Event]:
        """More of the arguments of the call that began last."""
        self.items[-1]["arguments"] += text
        yield "response.function_call_arguments.delta", {**self._place(), "delta": text}

    def close(self, status: str = "completed") -> Iterator[Event]:
        """Nothing more comes for the open item, if there is one."""
        if not self._open:
            return
        self._open = False
        item, place = self.items[-1], self._place()
        item["status"] = status
        if item["type"] == "function_call":
            done = {"name": item["name"], "arguments": item["arguments"]}
            yield "response.function_call_arguments.done", {**place, **done}
        else:
            part = item["content"][0]
            kind = "output_text" if item["type"] == "message" else "reasoning_text"
            scores = {"logprobs": part["logprobs"]} if item["type"] == "message" else {}
            yield f"response.{kind}.done", {**place, "content_index": 0, "text": part["text"], **scores}
            yield "response.content_part.done", {**place, "content_index": 0, "part": part}
        yield "response.output_item.done", {"output_index": place["output_index"], "item": item}

    def _continues(self, kind: str) -> bool:
        return self._open and self.items[-1]["type"] == kind

    def _begin(self, item: dict[str, Any], part: dict[str, Any] | None) -> Iterator[Event]:
        self._open = True
        self.items.append(item)
        place = self._place()
        empty = {**item, "content": []} if part else dict(item)
        yield "response.output_item.added", {"output_index": place["output_index"], "item": empty}
        if part is not None:
            item["content"].append(part)
            yield "response.content_part.added", {**place, "content_index": 0, "part": dict(part)}

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}


def _name(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


__all__ = ["Event", "ItemWriter"]
