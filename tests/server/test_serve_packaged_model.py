"""`engine serve` and `engine chat` with the packaged model, from the outside."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

pytestmark = pytest.mark.slow

PROGRAM = [sys.executable, "-c", "from engine.server.cli.main import main; main()"]
PAGE = Path(__file__).parents[2] / "docs" / "responses-and-messages.md"
CAT = "Repeat after me: the cat sat on the mat."
ANSWER = "The cat sat on the mat."


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A server, which must end with 0 when it is told to."""
    process = subprocess.Popen([*PROGRAM, "serve", "--port", "0"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        url = process.stdout.readline().rpartition(" ")[2].strip()
        assert httpx.get(f"{url}/health/live", trust_env=False).status_code == 200
        while httpx.get(f"{url}/health/ready", trust_env=False).status_code == 503:
            assert process.poll() is None
            time.sleep(0.1)
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def client(base: str) -> Iterator[openai.OpenAI]:
    with openai.DefaultHttpxClient(trust_env=False) as http:
        yield openai.OpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0, http_client=http)


def test_the_official_client_gets_the_right_answer(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    messages: list[openai.types.chat.ChatCompletionMessageParam] = [{"role": "user", "content": CAT}]
    reply = client.chat.completions.create(model=model.id, messages=messages, temperature=0)
    assert reply.choices[0].message.content == ANSWER
    assert reply.usage is not None
    assert reply.usage.prompt_tokens == 41
    stream = client.chat.completions.create(model=model.id, messages=messages, temperature=0, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == ANSWER


def test_a_repeated_prompt_is_reported_as_cached(client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    prompt = " ".join(f"Item {i} weighs {i * 7} grams." for i in range(40))
    usages = [client.completions.create(model=model.id, prompt=prompt, max_tokens=1).usage for _ in range(2)]
    cached = [usage.prompt_tokens_details.cached_tokens for usage in usages if usage and usage.prompt_tokens_details]
    assert cached[0] == 0
    assert usages[1] is not None
    assert (cached[1] or 0) > usages[1].prompt_tokens * 0.9


@pytest.mark.parametrize("number", [0, 1], ids=["responses", "messages"])
def test_the_examples_of_the_documentation_run(
    base: str, number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[number]
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    exec(code.replace("http://127.0.0.1:8000", base), {})
    said = capsys.readouterr().out
    assert ("Paris" in said) if number == 0 else said.strip()


def test_what_must_have_a_form_has_it_over_each_api(base: str, client: openai.OpenAI) -> None:
    (model,) = client.models.list()
    city = {"type": "object", "properties": {"city": {"enum": ["Rome", "Paris"]}}, "required": ["city"]}
    flat: Any = [{"type": "function", "name": "weather", "parameters": city, "strict": True}]
    forced: Any = {"type": "function", "name": "weather"}
    response = client.responses.create(
        model=model.id, input="Weather?", temperature=0, max_output_tokens=200, tools=flat, tool_choice=forced
    )
    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Paris")
    with anthropic.DefaultHttpxClient(trust_env=False) as http:
        claude = anthropic.Anthropic(base_url=base, api_key="none", max_retries=0, http_client=http)
        message = claude.messages.create(
            model=model.id,
            max_tokens=200,
            messages=[{"role": "user", "content": "Weather?"}],
            tools=[{"name": "weather", "input_schema": city}],
            tool_choice={"type": "tool", "name": "weather"},
            extra_body={"temperature": 0},
        )
    (block,) = message.content
    assert block.type == "tool_use"
    assert block.input["city"] in ("Rome", "Paris")


def test_chat_starts_a_server_of_its_own() -> None:
    command = [*PROGRAM, "chat", "--temperature", "0"]
    result = subprocess.run(command, input=CAT + "\n", capture_output=True, text=True, timeout=200)
    assert (result.returncode, result.stdout) == (0, ANSWER + "\n")


@pytest.mark.parametrize("stop", [None, [" the", "mat."], ["\n"]], ids=["none", "words", "newline"])
@pytest.mark.parametrize("content", [CAT, "Write one line of Python.", "Say hello in Greek and add an emoji."])
def test_a_stream_says_what_the_whole_answer_says(base: str, content: str, stop: list[str] | None) -> None:
    body = {"messages": [{"role": "user", "content": content}], "stop": stop, "max_tokens": 24, "temperature": 0}
    with httpx.Client(base_url=base, timeout=60, trust_env=False) as http:
        (whole,) = http.post("/v1/chat/completions", json=body).json()["choices"]
        lines = http.post("/v1/chat/completions", json={**body, "stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    parts = [json.loads(line[6:])["choices"][0] for line in lines[:-2]]
    assert "".join(part["delta"].get("content", "") for part in parts) == whole["message"]["content"]
    assert (parts[-1]["finish_reason"], parts[-1]["stop_reason"]) == (whole["finish_reason"], whole["stop_reason"])
    assert not any(word in whole["message"]["content"] for word in stop or ())
