"""LangChain's `ChatOpenAI` drives the server: chat, stream, tools, structured output; over both of OpenAI's APIs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, SecretStr

CALL = 'Well. <tool_call>{"name": "weather", "arguments": {"city": "Rom"}}</tool_call>'


class City(BaseModel):
    """A city."""

    name: str
    people: int


def weather(city: str) -> str:
    """The weather in a city."""
    return f"sun in {city}"


@pytest.fixture(params=[False, True], ids=["chat", "responses"])
def connect(request: pytest.FixtureRequest) -> Callable[[Any], ChatOpenAI]:
    def make(live: Any) -> ChatOpenAI:
        return ChatOpenAI(
            base_url=f"{live.base}/v1",
            api_key=SecretStr("none"),
            model="tiny",
            max_retries=0,
            use_responses_api=request.param,
            stream_usage=True,
            http_client=httpx.Client(trust_env=False),
        )

    return make


def test_chat(connect: Any, live: Any) -> None:
    reply = connect(live).invoke("hi")
    assert reply.text == "hello world"
    assert reply.usage_metadata["output_tokens"] == 12


def test_stream(connect: Any, live: Any) -> None:
    pieces = list(connect(live).stream("hi"))
    assert "".join(piece.text for piece in pieces) == "hello world"
    assert sum((piece.usage_metadata or {}).get("output_tokens", 0) for piece in pieces) == 12


def test_tools(connect: Any, saying: Any) -> None:
    model = connect(saying(CALL)).bind_tools([weather])
    reply = model.invoke("hi")
    (call,) = reply.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Rom"})
    gathered: Any = None
    for piece in model.stream("hi"):
        gathered = piece if gathered is None else gathered + piece
    assert [c["args"] for c in gathered.tool_calls] == [{"city": "Rom"}]
    history = [HumanMessage("hi"), reply, ToolMessage(weather("Rom"), tool_call_id=call["id"])]
    assert isinstance(model.invoke(history), AIMessage)


def test_structured_output(connect: Any, saying: Any) -> None:
    live = saying('{"name": "Rom", "people": 3}')
    assert connect(live).with_structured_output(City).invoke("hi") == City(name="Rom", people=3)
    assert live.core.calls[0].params.structured.kind == "json_schema"
