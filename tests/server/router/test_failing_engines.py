"""What clients see when engines refuse, die or hang: an answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from engine.server.router.worker import Standing


def text(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@contextmanager
def crooked(reply: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A server that looks healthy, and answers requests with these bytes and the end of the connection."""
    sock = socket.create_server(("127.0.0.1", 0))
    heard: list[bytes] = []

    def serve(client: socket.socket) -> None:
        with client:
            request = client.recv(65536)
            if request.startswith(b"GET /health"):
                client.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            elif request.startswith(b"POST"):
                heard.append(request)
                client.sendall(reply)

    def accept() -> None:
        while True:
            try:
                client, _ = sock.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}", heard
    finally:
        sock.shutdown(socket.SHUT_RDWR)
        sock.close()
        thread.join(10)


BROKEN = [
    b"",
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n",
    b"HTTP/1.1 500 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    b"HTTP/1.1 503 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    b"HTTP/1.1 429 No\r\ncontent-length: 0\r\nconnection: close\r\n\r\n",
    b"this is no HTTP\r\n\r\n",
]


@pytest.mark.parametrize("reply", BROKEN)
def test_a_request_goes_to_another_engine(
    engines: Callable[..., Any], routing: Callable[..., Any], reply: bytes
) -> None:
    good = engines("answer")
    with crooked(reply) as (bad, heard):
        router = routing([], [bad, good.base])
        router.until(lambda: all(worker.usable for worker in router.state.workers))
        for _ in range(3):
            assert text(router.chat()) == "answer"
            router.until(lambda: all(worker.usable for worker in router.state.workers))
        assert heard
        assert f'engine_router_retries_total{{worker="{bad}"}}' in router.http.get("/metrics").text


@pytest.mark.parametrize("reply", [*BROKEN, b"HTTP/1.1 400 No\r\ncontent-length: 2\r\n\r\n{}"])
def test_a_prefill_engine_that_fails_costs_time_only(
    engines: Callable[..., Any], routing: Callable[..., Any], reply: bytes
) -> None:
    good = engines("answer")
    with crooked(reply) as (bad, heard):
        router = routing([bad], [good.base])
        router.until(lambda: all(worker.usable for worker in router.state.workers))
        assert text(router.chat()) == "answer"
        assert heard
        assert good.core.calls[0].kv_transfer is None


def test_the_last_answer_is_told_when_all_engines_refuse(
    engines: Callable[..., Any], routing: Callable[..., Any]
) -> None:
    with crooked(b"HTTP/1.1 429 No\r\nretry-after: 7\r\ncontent-length: 4\r\n\r\nbusy") as (bad, _):
        router = routing([], [bad])
        router.until(lambda: router.worker(bad).usable)
        answer = router.chat()
        assert (answer.status_code, answer.text, answer.headers["retry-after"]) == (429, "busy", "7")


def test_without_any_engine_it_is_a_503_in_the_words_of_the_api(routing: Callable[..., Any]) -> None:
    router = routing([], ["http://127.0.0.1:9"], retry={"wait_seconds": 0.1})
    router.until(lambda: router.state.workers[0].standing is Standing.DEAD)
    answer = router.chat()
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert "no engine" in answer.json()["error"]["message"]
    messages = [{"role": "user", "content": "hi"}]
    answer = router.http.post("/v1/messages", json={"messages": messages, "max_tokens": 3})
    assert answer.json()["error"]["type"] == "overloaded_error"
    assert router.http.get("/v1/models").status_code == 503
    assert router.http.get("/health/ready").status_code == 503
    assert router.http.get("/health/live").status_code == 200


def test_a_request_waits_for_an_engine_that_comes_up(engines: Callable[..., Any], routing: Callable[..., Any]) -> None:
    engine = engines("answer")
    ready, engine.core.ready = engine.core.ready, None
    router = routing([], [engine.base])
    router.until(lambda: router.worker(engine.base).standing is Standing.UNREADY)
    timer = threading.Timer(0.2, lambda: engine.call(lambda: setattr(engine.core, "ready", ready)))
    timer.start()
    assert text(router.chat()) == "answer"
    timer.join()


def test_who_waits_for_an_engine_that_is_found_dead_is_sent_elsewhere(
    engines: Callable[..., Any], routing: Callable[..., Any]
) -> None:
    hanging, good = engines("never"), engines("answer")
    hanging.call(hanging.core.gate.clear)
    router = routing([], [hanging.base, good.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    router.worker(good.base).active += 100  # so that the other one is chosen
    answers: list[str] = []
    client = threading.Thread(target=lambda: answers.append(text(router.chat())))
    client.start()
    router.until(lambda: router.worker(hanging.base).active == 1)
    router.until(lambda: router.worker(hanging.base).die() is None)
    client.join(10)
    assert answers == ["answer"]
    hanging.until(lambda: len(hanging.core.aborted) == 1)
    hanging.call(hanging.core.gate.set)


def test_a_stream_that_breaks_off_ends_with_an_error(routing: Callable[..., Any]) -> None:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    with crooked(head + b"a\r\ndata: {}\n\n\r\n") as (bad, _):
        router = routing([], [bad])
        router.until(lambda: router.worker(bad).usable)
        answer = router.chat(stream=True)
        first, error, done, _ = answer.text.split("\n\n")
        assert (first, done) == ("data: {}", "data: [DONE]")
        assert "the engine that wrote this answer is gone" in error
        assert error.startswith('data: {"error":')
        answer = router.http.post("/v1/messages", json={"messages": [], "stream": True})
        assert "event: error" in answer.text
        answer = router.http.post("/v1/responses", json={"input": "hi", "stream": True})
        assert "event: error" in answer.text


def test_a_client_that_hangs_up_frees_both_sides(engines: Callable[..., Any], routing: Callable[..., Any]) -> None:
    prefill, decode = engines("prompt"), engines("answer")
    router = routing([prefill.base], [decode.base])
    router.until(lambda: all(worker.usable for worker in router.state.workers))
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    for engine in (prefill, decode):
        engine.call(engine.core.gate.clear)
        with _connection(router.base) as client:
            client.sendall(_request("/v1/chat/completions", body))
            engine.until(lambda engine=engine: engine.core.running == 1)
        engine.until(lambda engine=engine: len(engine.core.aborted) == 1)
        router.until(lambda: not router.state.active and not any(worker.active for worker in router.state.workers))
        engine.call(engine.core.gate.set)
    prefill.until(lambda: any(verb == "release_kv" for verb, _ in prefill.core.controls))
    (released,) = [arguments for verb, arguments in prefill.core.controls if verb == "release_kv"]
    assert released["params"]["remote_engine_id"] == "prompt"
    assert text(router.chat()) == "answer"


def _connection(base: str) -> socket.socket:
    host, _, port = base.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)))


def _request(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(raw)}\r\n\r\n".encode() + raw
