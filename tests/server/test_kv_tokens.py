"""Handing over KV by token: what is refused, and that the token says what the parameters say."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import FinishReason, Output
from engine.testing.client import Call

PARAMS = {"do_remote_prefill": True, "handle": {"num_tokens": 3, "via": {"local": {"é": 1}}}}
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
APIS = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/messages", {**CHAT, "max_tokens": 5}),
]


@pytest.fixture
def connected(serving: Callable[..., Any]) -> Any:
    def script(call: Call) -> list[Output]:
        published = PARAMS if (call.kv_transfer or {}).get("do_remote_decode") else None
        return [Output("", token_ids=[65], finish_reason=FinishReason.LENGTH, kv_transfer=published)]

    return serving(script, ("kv_connectors=[local]",))


@pytest.mark.parametrize(("path", "body"), APIS)
def test_every_api_exports_and_imports(connected: Any, path: str, body: dict[str, Any]) -> None:
    first = connected.http.post(path, json={**body, "kv_transfer_action": "export"}).json()
    assert first["kv_transfer_params"] == PARAMS
    more = {"kv_transfer_action": "import", "kv_transfer_token": first["kv_transfer_token"]}
    second = connected.http.post(path, json={**body, **more})
    assert second.status_code == 200
    assert "kv_transfer_token" not in second.json()
    assert connected.core.calls[-1].kv_transfer == PARAMS


@pytest.mark.parametrize(("path", "body"), APIS)
def test_every_api_has_the_parameters(connected: Any, path: str, body: dict[str, Any]) -> None:
    answer = connected.http.post(path, json={**body, "kv_transfer_params": {"do_remote_decode": True}})
    assert answer.json()["kv_transfer_params"] == PARAMS
    assert "kv_transfer_token" not in answer.json()
    assert "x-engine-ignored-fields" not in answer.headers


@pytest.mark.parametrize(("path", "body"), APIS[:3])
def test_a_stream_exports_with_its_end(connected: Any, path: str, body: dict[str, Any]) -> None:
    text = connected.http.post(path, json={**body, "stream": True, "kv_transfer_action": "export"}).text
    assert text.count('"kv_transfer_token":"kv1.') == 1


def token(data: Any) -> str:
    return "kv1." + base64.urlsafe_b64encode(json.dumps(data).encode()).decode()


MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"kv_transfer_action": "move"}, "must be export or import, not 'move'"),
    ({"kv_transfer_action": "import"}, "needs the kv_transfer_token"),
    ({"kv_transfer_token": "kv1.x"}, "needs kv_transfer_action: import"),
    ({"kv_transfer_action": "export", "kv_transfer_token": "kv1.x"}, "returned by an export"),
    ({"kv_transfer_action": "export", "kv_transfer_params": {}}, "either kv_transfer_action or kv_transfer_params"),
    *(
        ({"kv_transfer_action": "import", "kv_transfer_token": text}, "none that an export returned")
        for text in (
            "",
            "nonsense",
            "kv1.",
            "kv1.é",
            "kv1.AAAA",
            "kv1.****",
            token([]),
            token({}),
            token({"do_remote_prefill": "yes"}),
            token(PARAMS)[:-9],
            "kv1." + "A" * 2_000_000,
            token(0).replace("MA", base64.b64encode(b"[" * 5000).decode()),
        )
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), MISTAKES)
def test_mistakes_are_told(connected: Any, fields: dict[str, Any], sentence: str) -> None:
    error = connected.error(connected.chat(**fields))
    assert sentence in error["message"]
    assert len(error["message"]) < 200
    assert connected.core.calls == []


def test_a_token_needs_a_connector(live: Any) -> None:
    error = live.error(live.chat(kv_transfer_action="export"))
    assert "no KV connector with the role producer" in error["message"]
