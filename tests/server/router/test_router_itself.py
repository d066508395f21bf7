"""The router's configuration, probes, levers, surface and end."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from engine.errors import ConfigError
from engine.server.cli.route import command
from engine.server.router.config import load_router

ADMIN = {"Authorization": "Bearer admin"}


@pytest.fixture
def two(engines: Callable[..., Any], routing: Callable[..., Any]) -> tuple[Any, Any, Any]:
    """A router over two decode engines."""
    first, second = engines("one"), engines("two")
    router = routing([], [first.base, second.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    return router, first, second


MISTAKES = [
    ("prefill: []", "decode is missing"),
    ("decode: []", "decode is []"),
    ("decode: [localhost:8000]", r"file.yaml:1: decode.0 is \"localhost:8000\", expected the address of an engine"),
    ("decode: [ftp://a]", "expected the address of an engine"),
    ("decode: [http://a]\nprefill: [http://a/]", "http://a is named twice"),
    ("decode: [http://a]\nhandover: {mode: sometimes}", "file.yaml:2: handover.mode"),
    ("decode: [http://a]\nhandovr: {}", "did you mean 'handover'"),
    ("[]", "expected a mapping"),
]


@pytest.mark.parametrize(("text", "sentence"), MISTAKES)
def test_mistakes_in_the_configuration_are_told(tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "file.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=sentence.replace("[]", r"\[\]")):
        load_router(path)


def test_the_command_line_overrides_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file.yaml"
    path.write_text("decode: [http://a]")
    assert load_router(path, ["decode.1=http://b", "server.port=0"]).decode == ["http://a", "http://b"]
    result = CliRunner().invoke(command, [str(path), "--port", "70000"])
    assert isinstance(result.exception, ConfigError)
    assert "handover: {mode: auto}" in CliRunner().invoke(command, ["--help"]).output


def test_readiness_is_that_of_the_engines(two: tuple[Any, Any, Any]) -> None:
    router, first, second = two
    assert router.http.get("/health/ready").json() == {"status": "ready", "engines": {"prefill": 0, "decode": 2}}
    for engine in (first, second):
        engine.call(lambda engine=engine: setattr(engine.state, "draining", True))
    router.until(lambda: not any(worker.usable for worker in router.state.workers))
    assert router.http.get("/health").status_code == 503
    assert router.http.get("/health/live").status_code == 200
    assert router.http.get("/health/startup").status_code == 200  # it was ready once
    assert router.http.get("/load").json() == {"server_load": 0, "draining": False}


def test_every_route_of_an_engine_is_there(two: tuple[Any, Any, Any]) -> None:
    router, first, _ = two
    assert router.http.get("/v1/models").json()["data"][0]["id"] == "tiny"
    assert router.http.get("/v1/models/tiny").json()["id"] == "tiny"
    assert router.http.get("/v1/models/other").status_code == 404
    assert router.http.get("/version").json() == first.http.get("/version").json()
    assert router.http.post("/tokenize", json={"prompt": "hey"}).json()["count"] == 3
    assert router.http.post("/detokenize", json={"tokens": [104]}).json() == {"prompt": "h"}
    counted = router.http.post("/v1/messages/count_tokens", json={"messages": [{"role": "user", "content": "hi"}]})
    assert counted.json()["input_tokens"] > 2
    assert router.http.get("/no/such/thing?x=1").status_code == 404
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    assert router.http.options("/v1/chat/completions", headers=preflight).status_code == 200


@pytest.mark.parametrize(
    "path", ["/v1/../engine/config", "/./engine/config", "/v1/%2e%2e/engine/config", "/a/" + "b" * 65536]
)
def test_no_path_leads_to_what_a_router_keeps_closed(two: tuple[Any, Any, Any], path: str) -> None:
    router, _, _ = two
    with socket.create_connection(("127.0.0.1", int(router.base.rpartition(":")[2]))) as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer admin\r\n\r\n".encode())
        assert client.recv(1000).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize("previous", ["../../engine/config", "a\nb", "a?b", "é", "x" * 70000, 7, ""])
def test_odd_names_of_responses_are_the_engines_business(two: tuple[Any, Any, Any], previous: object) -> None:
    router, first, _ = two
    body = {"input": "hi", "previous_response_id": previous}
    answer, direct = (http.post("/v1/responses", json=body) for http in (router.http, first.http))
    assert (answer.status_code, "error" in answer.json()) == (direct.status_code, "error" in direct.json())
    assert answer.status_code < 500


def test_what_one_engine_keeps_is_found(two: tuple[Any, Any, Any]) -> None:
    router, first, second = two
    made = [router.http.post("/v1/responses", json={"input": "hi"}).json()["id"] for _ in range(2)]
    assert (len(first.core.calls), len(second.core.calls)) == (1, 1)
    for name in made:
        assert router.http.get(f"/v1/responses/{name}").json()["id"] == name
        assert router.http.get(f"/requests/{name}").status_code == 200
        more = router.http.post("/v1/responses", json={"input": "go on", "previous_response_id": name})
        assert more.json()["status"] == "completed"
        assert router.http.delete(f"/v1/responses/{name}").json()["deleted"] is True
    assert router.http.get("/v1/responses/resp_none").status_code == 404
    gone = router.http.post("/v1/responses", json={"input": "go on", "previous_response_id": made[0]})
    assert gone.status_code == 404


def test_keys_are_the_engines_business(engines: Callable[..., Any], routing: Callable[..., Any]) -> None:
    engine = engines("answer", "server.api_keys=[{key: mine}, {key: probe, scopes: [metrics]}]")
    router = routing([], [engine.base], probe={"seconds": 0.02, "key": "probe"})
    router.until(lambda: router.worker(engine.base).load.get("running") == 0)
    assert router.chat().status_code == 401
    body = {"messages": [{"role": "user", "content": "hi"}]}
    for headers in ({"Authorization": "Bearer mine"}, {"x-api-key": "mine"}):
        assert router.http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def test_an_operator_drains_one_engine(two: tuple[Any, Any, Any]) -> None:
    router, first, second = two
    answer = router.http.post("/engine/drain", json={"url": first.base}, headers=ADMIN)
    assert answer.json() == {"draining": True, "active": 0}
    for _ in range(3):
        router.chat()
    assert (len(first.core.calls), len(second.core.calls)) == (0, 3)
    told = router.http.get("/engine/transfer", headers=ADMIN).json()
    assert [row["drained"] for row in told["engines"]] == [True, False]
    assert told["decided"] == {"local: no prefill engine": 3}
    router.http.post("/engine/drain", json={"url": first.base, "drain": False}, headers=ADMIN)
    router.chat()
    assert len(first.core.calls) == 1
    assert router.http.post("/engine/drain", json={"url": "http://x"}, headers=ADMIN).status_code == 404
    assert router.http.get("/engine/leases", headers=ADMIN).status_code == 404


def test_an_operator_drains_the_router(two: tuple[Any, Any, Any]) -> None:
    router, first, _ = two
    first.call(first.core.gate.clear)
    answers: list[httpx.Response] = []
    client = threading.Thread(target=lambda: answers.append(router.chat()))
    client.start()
    router.until(lambda: len(router.state.active) == 1)
    assert router.http.post("/engine/drain", headers=ADMIN).json()["draining"] is True
    assert router.chat().status_code == 503
    assert router.http.get("/health/ready").json()["status"] == "draining"
    first.call(first.core.gate.set)
    client.join(10)
    assert answers[0].status_code == 200
    router.http.post("/engine/drain", json={"drain": False}, headers=ADMIN)
    assert router.chat().status_code == 200


def test_levers_take_the_key_of_the_administrator(two: tuple[Any, Any, Any], routing: Callable[..., Any]) -> None:
    router, first, _ = two
    assert router.http.get("/engine/transfer").status_code == 401
    assert router.http.post("/engine/drain", headers={"Authorization": "Bearer nearly"}).status_code == 401
    closed = routing([], [first.base], admin_key=None)
    assert closed.http.get("/engine/transfer", headers=ADMIN).status_code == 403


def test_large_bodies_are_refused_before_they_are_sent_on(engines: Callable[..., Any], routing: Any) -> None:
    engine = engines("answer")
    router = routing([], [engine.base], server={"max_body": 1000})
    router.until(lambda: router.worker(engine.base).usable)
    assert router.chat("x" * 2000).status_code == 413
    assert engine.core.calls == []


def test_what_happened_is_counted(two: tuple[Any, Any, Any]) -> None:
    router, first, _ = two
    router.chat()
    router.until(lambda: not router.state.active)
    text = router.http.get("/metrics").text
    assert 'engine_router_responses_total{status="200"} 1.0' in text
    assert f'engine_router_usable{{role="decode",worker="{first.base}"}} 1.0' in text
    assert 'engine_router_prompts{why="local: no prefill engine"} 1.0' in text


def test_the_model_of_costs_decides_and_says_why(
    engines: Callable[..., Any], routing: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = engines("prompt"), engines("answer")
    router = routing([prefill.base], [decode.base], handover={"mode": "auto"}, probe={"seconds": 60})
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    caplog.set_level("INFO", logger="engine")
    router.chat()
    assert decode.core.calls[-1].kv_transfer is not None
    assert "the link was never measured" in caplog.text

    def tell() -> None:
        router.worker(prefill.base).load["prefill"] = {"points": [[100, 0.1]], "age": 0.0}
        router.worker(decode.base).load |= {
            "prefill": {"points": [[100, 0.1]], "age": 0.0},
            "fetch": {"points": [[100, 0.05]], "age": 0.0},
        }

    router.until(lambda: tell() is None)
    router.chat()
    assert decode.core.calls[-1].kv_transfer is None
    assert "costs less here" in caplog.text
    router.worker(decode.base).active += 1  # a stream that a prompt would hold up
    router.chat()
    assert decode.core.calls[-1].kv_transfer is not None
    assert "costs less there" in caplog.text
    router.worker(decode.base).active -= 1
    decided = router.http.get("/engine/transfer", headers=ADMIN).json()["decided"]
    assert decided == {
        "remote: the link was never measured": 1,
        "local: costs less here": 1,
        "remote: costs less there": 1,
    }
