"""LiteLLM drives the server: chat, stream, tools, structured output; as OpenAI's and as Anthropic's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import BaseModel

HI: Any = [{"role": "user", "content": "hi"}]
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
CALL = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'

Complete = Callable[..., Any]


class City(BaseModel):
    name: str
    people: int


@pytest.fixture(params=["openai", "anthropic"])
def complete(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Complete:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or else it asks the internet for prices
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    import litellm

    def call(live: Any, **fields: Any) -> Any:
        base = f"{live.base}/v1" if request.param == "openai" else live.base
        name = f"{request.param}/tiny"
        return litellm.completion(name, HI, api_base=base, api_key="none", max_tokens=500, **fields)

    return call


def test_chat(complete: Complete, live: Any) -> None:
    reply = complete(live)
    assert reply.choices[0].message.content == "hello world"
    assert reply.usage.completion_tokens == 12


def test_stream(complete: Complete, live: Any) -> None:
    text = "".join(chunk.choices[0].delta.content or "" for chunk in complete(live, stream=True))
    assert text == "hello world"


def test_tools(complete: Complete, saying: Any) -> None:
    live = saying(CALL)
    choice = complete(live, tools=TOOLS).choices[0]
    (call,) = choice.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("weather", '{"city": "Rom"}')
    assert choice.finish_reason == "tool_calls"
    chunks = [chunk.choices[0].delta for chunk in complete(live, tools=TOOLS, stream=True)]
    pieces = [call.function for delta in chunks for call in delta.tool_calls or ()]
    assert [piece.name for piece in pieces if piece.name] == ["weather"]
    assert "".join(piece.arguments or "" for piece in pieces) == '{"city": "Rom"}'


def test_structured_output(complete: Complete, saying: Any) -> None:
    live = saying('{"name": "Rom", "people": 3}')
    reply = complete(live, response_format=City)
    assert City.model_validate_json(reply.choices[0].message.content) == City(name="Rom", people=3)
    assert live.core.calls[0].params.structured is not None
