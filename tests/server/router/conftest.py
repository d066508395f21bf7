"""A router over scripted engines, all of them real HTTP servers in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from engine.messages import Output
from engine.server.lifecycle import DrainingServer
from engine.server.listening import bind
from engine.server.router.app import create_router_app
from engine.server.router.config import RouterConfig
from engine.server.router.probing import Prober
from engine.server.router.state import RouterState, open_http
from engine.server.router.worker import Worker
from engine.testing.client import Call, Script, say
from engine.testing.tokenizer import EOS

QUICK = {
    "probe": {"seconds": 0.02, "timeout": 5},
    "retry": {"wait_seconds": 5},
    "handover": {"mode": "always"},
    "admin_key": "admin",
}
CONNECTED = ("kv_connectors=[{use: local, role: both}]",)
HANDLE = {"num_tokens": 8, "via": {"local": {}}}


class Routed:
    """The router, and an HTTP client for it."""

    def __init__(self, prefill: list[str], decode: list[str], **settings: Any) -> None:
        self.config = RouterConfig.model_validate({**QUICK, "prefill": prefill, "decode": decode, **settings})
        self._sock = bind("127.0.0.1", 0)
        self.base = f"http://127.0.0.1:{self._sock.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.base, timeout=20, trust_env=False)
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with open_http(self.config) as http:
            self.state = RouterState(self.config, http)
            watching = asyncio.create_task(Prober(http, self.config.probe).watch(self.state.workers))
            self._server = DrainingServer(create_router_app(self.state), self.state)
            self._started.set()
            await self._server.serve(sockets=[self._sock])
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    def __enter__(self) -> Routed:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self._loop.call_soon_threadsafe(self._server.stop)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the router did not stop"

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the router's thread holds."""

        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(poll(), 10), self._loop).result(12)

    def worker(self, url: str) -> Worker:
        (found,) = [worker for worker in self.state.workers if worker.url == url]
        return found

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)


def producing(text: str, name: str) -> Script:
    """Says a text, and publishes the KV when that is asked for."""
    plain = say(list(text.encode()), eos=EOS)

    def script(call: Call) -> list[Output]:
        outputs = list(plain(call))
        if (call.kv_transfer or {}).get("do_remote_decode"):
            last = outputs.pop()
            params = {"do_remote_prefill": True, "remote_engine_id": name, "handle": HANDLE}
            outputs.append(Output("", token_ids=last.token_ids, finish_reason=last.finish_reason, kv_transfer=params))
        return outputs

    return script


@pytest.fixture
def routing() -> Iterator[Callable[..., Routed]]:
    """Starts routers; they stop at the end of the test, before the engines."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Routed(*args, **kwargs))


@pytest.fixture
def engines(start_server: Any) -> Iterator[Callable[..., Any]]:
    """Starts scripted engines that have a KV connector; each says its own text."""
    with ExitStack() as stack:

        def start(text: str, *more: str) -> Any:
            return stack.enter_context(start_server(producing(text, text), (*CONNECTED, *more)))

        yield start
