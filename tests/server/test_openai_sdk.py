"""The `openai` package drives tools, structured output and the Responses API; test_official_client.py has the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest
from pydantic import BaseModel

HI: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = '<think>Look.</think><tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
FLAT_TOOLS: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]


class City(BaseModel):
    name: str
    people: int


@pytest.fixture
def connect() -> Iterator[Callable[[Any], openai.OpenAI]]:
    with ExitStack() as stack:

        def make(live: Any) -> openai.OpenAI:
            http = stack.enter_context(openai.DefaultHttpxClient(trust_env=False))
            return openai.OpenAI(base_url=f"{live.base}/v1", api_key="none", max_retries=0, http_client=http)

        yield make


def test_chat_with_tools(connect: Any, saying: Any) -> None:
    client = connect(saying(CALL))
    message = client.chat.completions.create(model="tiny", messages=HI, tools=TOOLS).choices[0].message
    assert message.tool_calls[0].function.name == "weather"
    assert message.tool_calls[0].function.arguments == '{"city": "Rom"}'
    assert message.reasoning_content == "Look."
    with client.chat.completions.stream(model="tiny", messages=HI, tools=TOOLS) as stream:
        stream.until_done()
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == '{"city": "Rom"}'


def test_chat_with_a_schema(connect: Any, saying: Any) -> None:
    live = saying('{"name": "Rom", "people": 3}')
    reply = connect(live).chat.completions.parse(model="tiny", messages=HI, response_format=City)
    assert reply.choices[0].message.parsed == City(name="Rom", people=3)
    assert live.core.calls[0].params.structured.kind == "json_schema"


def test_responses(connect: Any, live: Any) -> None:
    client = connect(live)
    first = client.responses.create(model="tiny", input="hi", instructions="Be kind.")
    assert first.output_text == "hello world"
    assert first.usage.output_tokens == 12
    second = client.responses.create(model="tiny", input="more", previous_response_id=first.id)
    assert client.responses.retrieve(second.id).output_text == "hello world"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError, match="there is no response"):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.BadRequestError, match="truncation"):
        client.responses.create(model="tiny", input="hi", truncation="auto")


def test_responses_with_tools_streamed(connect: Any, saying: Any) -> None:
    client = connect(saying(CALL))
    with client.responses.stream(model="tiny", input="hi", tools=FLAT_TOOLS) as stream:
        pieces = "".join(event.delta for event in stream if event.type == "response.function_call_arguments.delta")
        final = stream.get_final_response()
    assert pieces == '{"city": "Rom"}'
    thought, call = final.output
    assert thought.content[0].text == "Look."
    assert (call.type, call.name, call.arguments) == ("function_call", "weather", pieces)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "sun"}
    again = client.responses.create(model="tiny", input=[result], previous_response_id=final.id, tools=FLAT_TOOLS)
    assert again.output[1].name == "weather"


def test_responses_with_a_schema(connect: Any, saying: Any) -> None:
    live = saying('{"name": "Rom", "people": 3}')
    client = connect(live)
    reply = client.responses.parse(model="tiny", input="hi", text_format=City)
    assert reply.output_parsed == City(name="Rom", people=3)
    assert live.core.calls[0].params.structured.kind == "json_schema"
    with client.responses.stream(model="tiny", input="hi", text_format=City) as stream:
        assert "".join(e.delta for e in stream if e.type == "response.output_text.delta").startswith('{"name"')
        assert stream.get_final_response().output_parsed == City(name="Rom", people=3)
