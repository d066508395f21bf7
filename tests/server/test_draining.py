"""What signals and failures do to a server process."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

PROGRAM = textwrap.dedent("""
    import asyncio, sys
    from engine.config.load import load_config
    from engine.messages import FinishReason, Output
    from engine.server.app import create_app
    from engine.server.cli.serve import bind
    from engine.server.lifecycle import serve
    from engine.server.metrics import Metrics
    from engine.server.state import ServerState
    from engine.testing.client import ScriptedClient
    from engine.testing.tokenizer import byte_tokenizer

    class Slow(ScriptedClient):
        async def generate(self, prompt, params, **fields):
            if prompt == [33]:
                self.failed = "the core is dead"
                return
            for i in range(params.max_tokens):
                await asyncio.sleep(0.05)
                last = i + 1 == params.max_tokens
                yield Output("", token_ids=[97], finish_reason=FinishReason.LENGTH if last else None)

    async def main():
        config = load_config(None, sys.argv[1:]).config
        client = Slow(lambda call: [])
        state = ServerState(client=client, config=config, model="m", metrics=Metrics("m"))
        sock = bind("127.0.0.1", 0)
        print(sock.getsockname()[1], flush=True)
        await serve(state, create_app(state), sock, byte_tokenizer)
        return client.failed or ""

    sys.exit(asyncio.run(main()) or 0)
""")


class Process:
    """A server in a process of its own."""

    def __init__(self, *overrides: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *overrides], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.base = f"http://127.0.0.1:{self.process.stdout.readline().strip()}"
        self.http = httpx.Client(base_url=self.base, timeout=20, trust_env=False)
        while self.http.get("/health/ready").status_code != 200:
            time.sleep(0.02)

    def complete(self, **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"prompt": "a", **fields})

    def signal(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait_until_draining(self) -> None:
        while self.http.get("/health/ready").json()["status"] != "draining":
            time.sleep(0.01)

    def end(self) -> int:
        return self.process.wait(15)

    def close(self) -> None:
        self.http.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., Process]]:
    with ExitStack() as stack:

        def make(*overrides: str) -> Process:
            made = Process(*overrides)
            stack.callback(made.close)
            return made

        yield make


class Background(threading.Thread):
    """A request on a thread of its own."""

    def __init__(self, server: Process, **fields: Any) -> None:
        super().__init__()
        self._server, self._fields = server, fields
        self.response: httpx.Response | None = None
        self.start()

    def run(self) -> None:
        self.response = httpx.post(
            f"{self._server.base}/v1/completions", json={"prompt": "a", **self._fields}, timeout=20, trust_env=False
        )

    def answer(self) -> httpx.Response:
        self.join(20)
        assert self.response is not None
        return self.response


def wait_for_running(server: Process) -> None:
    while 'engine_request_prompt_tokens_count{model_name="m"} 0.0' in server.http.get("/metrics").text:
        time.sleep(0.01)


def test_an_idle_server_ends_at_once_with_zero(start: Callable[..., Process]) -> None:
    server = start()
    assert server.complete(max_tokens=1).status_code == 200
    server.signal()
    assert server.end() == 0


def test_a_running_answer_finishes_while_new_requests_are_refused(start: Callable[..., Process]) -> None:
    server = start()
    running = Background(server, max_tokens=30)
    wait_for_running(server)
    server.signal()
    server.wait_until_draining()
    assert server.http.get("/health/live").status_code == 200
    refused = server.complete(max_tokens=1)
    assert refused.status_code == 503
    assert "shutting down" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"]
    assert running.answer().json()["usage"]["completion_tokens"] == 30
    assert server.end() == 0


@pytest.mark.parametrize("stream", [False, True])
def test_after_the_drain_an_answer_is_cut_off_with_an_error(start: Callable[..., Process], stream: bool) -> None:
    server = start("server.drain_seconds=0.3")
    running = Background(server, max_tokens=200, stream=stream)
    wait_for_running(server)
    server.signal()
    response = running.answer()
    assert response.status_code == (200 if stream else 503)
    assert "cut the answer short" in response.text
    assert response.text.endswith("data: [DONE]\n\n") == stream
    assert server.end() == 0


def test_a_second_signal_ends_the_drain(start: Callable[..., Process]) -> None:
    server = start()
    running = Background(server, max_tokens=200)
    wait_for_running(server)
    server.signal()
    server.wait_until_draining()
    server.signal()
    assert running.answer().status_code == 503
    assert server.end() == 0


def test_when_the_core_dies_the_process_ends_and_says_why(start: Callable[..., Process]) -> None:
    server = start()
    server.complete(prompt="!")
    assert server.end() == 1
    assert "the core is dead" in server.process.communicate()[1]
