"""The `openai` package reads what the server says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture
def client(live: Any) -> Iterator[openai.OpenAI]:
    with openai.DefaultHttpxClient(trust_env=False) as http:
        yield openai.OpenAI(base_url=f"{live.base}/v1", api_key="none", max_retries=0, http_client=http)


def test_chat(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=1)
    assert reply.choices[0].message.content == "hello world"
    assert reply.choices[0].logprobs is not None
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None


def test_streamed_chat(client: openai.OpenAI) -> None:
    text, usage = "", None
    options: Any = {"include_usage": True}
    for chunk in client.chat.completions.create(model="tiny", messages=HI, stream=True, stream_options=options):
        text += "".join(choice.delta.content or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    assert text == "hello world"
    assert usage is not None
    assert usage.completion_tokens == 12


def test_completions(client: openai.OpenAI) -> None:
    reply = client.completions.create(model="tiny", prompt=[[97], [98]], max_tokens=4, logprobs=1)
    assert [choice.text for choice in reply.choices] == ["hell", "hell"]
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=4, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == "hell"


def test_models_and_errors(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    with pytest.raises(openai.BadRequestError, match="temperature must be between 0"):
        client.completions.create(model="tiny", prompt="a", temperature=-1)
