"""OpenAI's and Anthropic's own clients, with a router between them and the engines."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import openai


def test_official_clients_notice_no_router(engines: Callable[..., Any], routing: Callable[..., Any]) -> None:
    prefill, decode = engines("prompt"), engines("answer")
    router = routing([prefill.base], [decode.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    with (
        openai.DefaultHttpxClient(trust_env=False) as http,
        anthropic.DefaultHttpxClient(trust_env=False) as other_http,
    ):
        client = openai.OpenAI(base_url=f"{router.base}/v1", api_key="none", max_retries=0, http_client=http)
        (model,) = client.models.list()
        stream = client.chat.completions.create(
            model=model.id, messages=[{"role": "user", "content": "hi"}], stream=True
        )
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "answer"
        assert client.responses.create(model=model.id, input="hi").output_text == "answer"
        other = anthropic.Anthropic(base_url=router.base, api_key="none", max_retries=0, http_client=other_http)
        with other.messages.stream(
            model=model.id, max_tokens=20, messages=[{"role": "user", "content": "hi"}]
        ) as messages:
            assert messages.get_final_text() == "answer"
    assert len(prefill.core.calls) == len(decode.core.calls) == 3
    assert all(call.kv_transfer["do_remote_prefill"] for call in decode.core.calls)
