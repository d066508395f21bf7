"""Request lines and headers that don't end, or come too slowly."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import pytest


def lines() -> Iterator[bytes]:
    """Headers without an end."""
    yield b"GET /health HTTP/1.1\r\nHost: x\r\n"
    while True:
        yield b"X-Small: y\r\n" * 500


def line() -> Iterator[bytes]:
    """One header without an end."""
    yield b"GET /health HTTP/1.1\r\nX-Large: "
    while True:
        yield b"a" * 8192


def path() -> Iterator[bytes]:
    """A request line without an end."""
    yield b"GET /"
    while True:
        yield b"a" * 8192


@pytest.mark.parametrize("endless", [lines, line, path])
def test_a_head_without_end_is_refused(live: Any, endless: Any) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sent = 0
        for piece in endless():
            try:
                sent += sock.send(piece)
            except ConnectionError:  # refused and closed while this was on its way
                break
            assert sent < 50 * 2**20, "the server takes all of it"
    live.until(lambda: not live.server.server_state.connections)
    assert live.complete().status_code == 200


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HTTP/1.1\r\nHost:", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /ver"]
)
def test_a_head_that_takes_too_long_is_refused(live: Any, begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.http._PATIENCE", 0.3)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(begun)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"headers were not complete" in answer
    assert b"HTTP/1.1 408 Request Timeout" in answer
    assert (b"HTTP/1.1 200 OK" in answer) == (b"version" in begun)


def test_long_headers_that_end_are_taken(live: Any) -> None:
    headers = {f"x-{i}": "a" * 1000 for i in range(30)}
    assert live.http.get("/version", headers=headers).status_code == 200


def test_the_body_of_a_request_that_offers_an_upgrade_is_read(live: Any) -> None:
    """Java's HttpClient offers HTTP/2 with every first request; declining it is to answer as usual."""
    offer = {"connection": "Upgrade, HTTP2-Settings", "upgrade": "h2c", "http2-settings": "AAMAAABkAAQCAAAAAAIAAAAA"}
    answer = live.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 3}, headers=offer)
    assert answer.json()["choices"][0]["text"] == "hel"
    assert live.complete().status_code == 200


def test_a_pipelined_head_that_never_ends_does_not_cut_the_answer_before(
    live: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("engine.server.http._PATIENCE", 0.2)
    body = json.dumps({"prompt": "abc", "max_tokens": 3}).encode()
    first = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    live.call(live.core.gate.clear)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(first + b"GET /ver")
        live.until(lambda: live.core.running == 1)
        sock.settimeout(0.5)
        with pytest.raises(TimeoutError):
            sock.recv(1)
        live.call(live.core.gate.set)
        sock.settimeout(10)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert answer.index(b'"text":"hel"') < answer.index(b"HTTP/1.1 408")
