from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.messages import FinishReason, Output
from engine.server.cli.endpoint import Endpoint, EndpointError
from engine.testing.client import say


def collect(endpoint: Endpoint, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    async def read() -> list[dict[str, Any]]:
        return [event async for event in endpoint.events(path, body)]

    return asyncio.run(read())


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_a_stream_is_read_to_its_end(live: Any, suffix: str) -> None:
    events = collect(Endpoint(live.base + suffix), "/v1/completions", {"prompt": "a", "stream": True})
    assert "".join(event["choices"][0]["text"] for event in events) == "hello world"


def test_a_plain_answer(live: Any) -> None:
    assert asyncio.run(Endpoint(live.base.removeprefix("http://")).first_model()) == "tiny"


def test_hanging_up_early_reaches_the_core(serving: Any) -> None:
    live = serving(say(list(b"ab")))

    async def peek() -> dict[str, Any]:
        events = Endpoint(live.base).events("/v1/completions", {"prompt": "a", "stream": True, "max_tokens": 250})
        first = await anext(events)
        live.core.gate.clear()
        await events.aclose()
        return first

    assert asyncio.run(peek())["choices"][0]["text"] == "a"
    live.call(live.core.gate.set)
    live.until(lambda: live.core.running == 0 and not live.state.active)


def test_a_refusal_is_told_in_the_servers_words(live: Any) -> None:
    with pytest.raises(EndpointError, match=r"refused \(400\): n must be an integer"):
        collect(Endpoint(live.base), "/v1/completions", {"prompt": "a", "n": "x"})


def test_an_error_in_the_middle_of_a_stream_is_raised(serving: Any) -> None:
    bad = Output("", finish_reason=FinishReason.ERROR, error="not finite")
    live = serving(lambda call: [Output("", token_ids=[97]), bad])
    with pytest.raises(EndpointError, match="gave up: not finite"):
        collect(Endpoint(live.base), "/v1/completions", {"prompt": "a", "stream": True})


def test_the_key_is_sent(serving: Any) -> None:
    live = serving(overrides=("server.api_keys=[secret]",))
    assert asyncio.run(Endpoint(live.base, "secret").first_model()) == "tiny"
    with pytest.raises(EndpointError, match=r"refused \(401\)"):
        asyncio.run(Endpoint(live.base).first_model())


def test_nobody_there() -> None:
    with pytest.raises(EndpointError, match=r"no server answers at http://127\.0\.0\.1:1"):
        asyncio.run(Endpoint("127.0.0.1:1").first_model())
    with pytest.raises(EndpointError, match="is no URL"):
        Endpoint("ftp://x")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n20\r\nshort",
        b"HTTP/1.1 200",
    ],
)
def test_an_answer_that_breaks_off(answer: bytes) -> None:
    async def run() -> None:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await Endpoint(f"http://127.0.0.1:{port}").get("/x")

    with pytest.raises(EndpointError, match="broke off"):
        asyncio.run(run())


def test_an_answer_without_a_length_ends_with_the_connection() -> None:
    async def run() -> Any:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b'HTTP/1.0 200 OK\r\n\r\n{"a": 1}')
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            return await Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}").get("/x")

    assert asyncio.run(run()) == {"a": 1}
