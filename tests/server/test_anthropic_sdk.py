"""The `anthropic` package reads what the server says on /v1/messages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import anthropic
import pytest
from pydantic import BaseModel

HI: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"name": "weather", "description": "Tells it.", "input_schema": PARAMETERS}]
CALL = '<think>Look.</think>Well. <tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
ASK: Any = {"model": "tiny", "max_tokens": 500, "messages": HI}


class City(BaseModel):
    name: str
    people: int


@pytest.fixture
def connect() -> Iterator[Callable[..., anthropic.Anthropic]]:
    with ExitStack() as stack:

        def make(live: Any, key: str = "none") -> anthropic.Anthropic:
            http = stack.enter_context(anthropic.DefaultHttpxClient(trust_env=False))
            return anthropic.Anthropic(base_url=live.base, api_key=key, max_retries=0, http_client=http)

        yield make


def test_chat(connect: Any, live: Any) -> None:
    client = connect(live)
    reply = client.messages.create(**ASK, system="Be kind.")
    assert reply.content[0].text == "hello world"
    assert (reply.stop_reason, reply.usage.output_tokens) == ("end_turn", 12)
    count = client.messages.count_tokens(model="tiny", messages=HI, system="Be kind.")
    assert count.input_tokens == reply.usage.input_tokens


def test_stream(connect: Any, live: Any) -> None:
    with connect(live).messages.stream(**ASK) as stream:
        assert "".join(stream.text_stream) == "hello world"
        final = stream.get_final_message()
    assert final.content[0].text == "hello world"
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", 12)


def test_tools_and_thoughts(connect: Any, saying: Any) -> None:
    client = connect(saying(CALL))
    whole = client.messages.create(**ASK, tools=TOOLS)
    with client.messages.stream(**ASK, tools=TOOLS) as stream:
        streamed = stream.get_final_message()
    for reply in (whole, streamed):
        thought, text, call = reply.content
        assert (thought.thinking, text.text.strip()) == ("Look.", "Well.")
        assert (call.name, call.input, reply.stop_reason) == ("weather", {"city": "Rom"}, "tool_use")
    result = {"type": "tool_result", "tool_use_id": whole.content[2].id, "content": "sun"}
    history = [*HI, {"role": "assistant", "content": whole.content}, {"role": "user", "content": [result]}]
    assert client.messages.create(model="tiny", max_tokens=500, messages=history, tools=TOOLS).content


def test_structured_output(connect: Any, saying: Any) -> None:
    live = saying('{"name": "Rom", "people": 3}')
    reply = connect(live).messages.parse(**ASK, output_format=City)
    assert reply.parsed_output == City(name="Rom", people=3)
    assert live.core.calls[0].params.structured.kind == "json_schema"


def test_keys_and_errors(connect: Any, serving: Any) -> None:
    live = serving(overrides=("server.api_keys=[secret]",))
    assert connect(live, "secret").messages.create(**ASK).stop_reason == "end_turn"
    with pytest.raises(anthropic.AuthenticationError, match="needs a key") as caught:
        connect(live, "wrong").messages.create(**ASK)
    assert caught.value.body["error"]["type"] == "authentication_error"
    with pytest.raises(anthropic.NotFoundError, match="no model 'other'"):
        connect(live, "secret").messages.create(**{**ASK, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="temperature must be between"):
        connect(live, "secret").messages.create(**ASK, extra_body={"temperature": -1})
