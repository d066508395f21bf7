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


def refusal(sock: socket.socket) -> tuple[bytes, str]:
    """The status line of an answer that closes the connection, and the sentence in its body."""
    answer = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)["error"]["message"]


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


def test_the_refusal_says_why(live: Any) -> None:
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nX-Large: " + b"a" * 2**16)
        status, message = refusal(sock)
    assert status == b"HTTP/1.1 431 Request Header Fields Too Large"
    assert "65536 bytes" in message


@pytest.mark.parametrize(
    "begun", [b"", b"GET /health HTTP/1.1\r\nHost:", b"GET /version HTTP/1.1\r\nHost: x\r\n\r\nGET /ver"]
)
def test_a_head_that_takes_too_long_is_refused(live: Any, begun: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.server.http._PATIENCE", 0.3)
    with socket.create_connection(("127.0.0.1", live.port), timeout=10) as sock:
        sock.sendall(begun)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    assert b"HTTP/1.1 408 Request Timeout" in answer
    assert (b"HTTP/1.1 200 OK" in answer) == (b"version" in begun)


def test_long_headers_that_end_are_taken(live: Any) -> None:
    headers = {f"x-{i}": "a" * 1000 for i in range(30)}
    assert live.http.get("/version", headers=headers).status_code == 200
