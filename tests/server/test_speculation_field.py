"""What a request says about drafts reaches the core, by every API, and its refusal comes back as a 400."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import FinishReason, Output
from engine.sampling_params import Speculation

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
        ("/v1/responses", {"input": "hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 5}),
    ],
)
def test_the_field_reaches_the_core(start_server: Callable[..., Any], path: str, body: dict[str, Any]) -> None:
    with start_server() as live:
        asked = {"method": "none", "max_tokens": 2}
        assert live.http.post(path, json={"model": "tiny", **body, "speculation": asked}).status_code == 200
        assert live.core.calls[-1].params.speculation == Speculation(method="none", max_tokens=2)
        assert live.http.post(path, json={"model": "tiny", **body}).status_code == 200
        assert live.core.calls[-1].params.speculation is None


def test_a_method_that_the_engine_lacks_is_a_mistake_of_the_client(start_server: Callable[..., Any]) -> None:
    text = "speculation.method is 'x', but this engine speculates with nothing: say 'none', or leave it out"
    refusal = [Output("", finish_reason=FinishReason.ERROR, error=text, invalid=True)]
    with start_server(lambda call: refusal) as live:
        answer = live.http.post("/v1/completions", json={"prompt": "hi", "speculation": {"method": "x"}})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == text
