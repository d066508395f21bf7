"""A real HTTP server on a free port, over a scripted core."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

from engine.config.load import load_config
from engine.messages import Ready
from engine.parsing.choice import choose_parsers
from engine.registry import Registry
from engine.server.app import create_app
from engine.server.cli.serve import bind, fast_loop
from engine.server.lifecycle import DrainingServer
from engine.server.metrics import Metrics
from engine.server.state import ServerState
from engine.testing.client import Script, ScriptedClient, say
from engine.testing.tokenizer import EOS, byte_tokenizer

HELLO = say(list(b"hello world"), eos=EOS)


class Live:
    """The server, an HTTP client for it, and the scripted core behind it."""

    def __init__(self, script: Script = HELLO, overrides: tuple[str, ...] = (), routers: Any = ()) -> None:
        config = load_config(None, overrides).config
        self.core = ScriptedClient(script)
        self.state = ServerState(
            client=self.core, config=config, model="tiny", metrics=Metrics("tiny"), tokenizer=byte_tokenizer()
        )
        self.app = create_app(self.state, routers)
        self.sock = bind("127.0.0.1", 0)
        self.port: int = self.sock.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"
        self.http = httpx.Client(base_url=self.base, timeout=20, trust_env=False)
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run_loop)

    def _run_loop(self) -> None:
        with asyncio.Runner(loop_factory=fast_loop()) as runner:
            runner.run(self._run())

    async def _run(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.server = DrainingServer(self.app, self.state)
        self._started.set()
        await self.server.serve(sockets=[self.sock])

    def __enter__(self) -> Live:
        self._thread.start()
        self._started.wait(10)
        return self

    def __exit__(self, *error: object) -> None:
        self.http.close()
        self.call(self.server.stop)
        self._thread.join(10)
        assert not self._thread.is_alive(), "the server did not stop"

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the server's thread and return its result."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self.loop).result(10)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition on the server's thread holds."""

        async def poll() -> None:
            while not condition():
                await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(poll(), 10), self.loop).result(12)

    def chat(self, content: str = "hi", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **fields}
        return self.http.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any = "abc", **fields: Any) -> httpx.Response:
        return self.http.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **fields})

    def error(self, response: httpx.Response, status: int = 400) -> dict[str, Any]:
        """The error object of a refused request, checked for its shape."""
        assert response.status_code == status, response.text
        error: dict[str, Any] = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert isinstance(error["message"], str)
        assert error["message"]
        return error


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a stream, which must end with DONE."""
    blocks = response.text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: ") for block in blocks[:-1])
    return [json.loads(block[6:]) for block in blocks[:-2]]


@pytest.fixture(scope="session")
def start_server() -> type[Live]:
    """Makes servers that are context managers, for fixtures of a wider scope."""
    return Live


@pytest.fixture
def serving() -> Iterator[Callable[..., Live]]:
    """Starts servers; they stop at the end of the test."""
    with ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(Live(*args, **kwargs))


@pytest.fixture
def live(serving: Callable[..., Live]) -> Live:
    """A server whose core says `hello world`."""
    return serving()


@pytest.fixture
def saying(serving: Callable[..., Live]) -> Callable[..., Live]:
    """Starts a server whose core says a text, with tool calls as Hermes writes them and thoughts in think tags."""

    def start(text: str, size: int = 3, overrides: tuple[str, ...] = ()) -> Live:
        script = say(list(text.encode()), eos=EOS, size=size)
        live = serving(script, ("parsers.tools=hermes", "parsers.reasoning=think", *overrides))
        live.core.ready = Ready(4096, 512, 16, 4, 8, {})  # room for tools, which are long in bytes
        model = byte_tokenizer().model_text(None)
        live.state.parsers = choose_parsers(live.state.config, Registry.discover(), model)
        return live

    return start


@pytest.fixture
def chunks() -> Callable[[httpx.Response], list[dict[str, Any]]]:
    """Reads the chunks of a stream."""
    return events
