"""vLLM's own router, unmodified, drives a prefill and a decode engine. Needs its wheel, which is no dependency of ours:

pip install --no-deps vllm-router setproctitle orjson aiohttp
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.testing.cluster import ServerProcess, free_port, tiny_engine

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed"),
]

PROMPT = "The quick brown fox jumps over the lazy dog. " * 4
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"model": "tiny", "prompt": PROMPT, "max_tokens": 24, "temperature": 0}),
    ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24}),
]


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    config = tiny_engine(tmp_path_factory.mktemp("vllm-router"), kv_connectors=["local"])
    pair = ServerProcess("serve", config, "--role", "prefill"), ServerProcess("serve", config, "--role", "decode")
    try:
        for process in pair:
            process.start()
        for process in pair:
            process.wait_ready()
        yield pair
    finally:
        for process in pair:
            process.end()


@pytest.fixture(scope="module")
def router(engines: tuple[ServerProcess, ServerProcess], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    prefill, decode = engines
    port, log = free_port(), tmp_path_factory.mktemp("log") / "router.txt"
    command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--vllm-pd-disaggregation", "--prefill", prefill.url, "--decode", decode.url]
    command += ["--prometheus-port", str(free_port()), "--policy", "round_robin"]
    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        while not _healthy(url):
            assert process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def _healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _text(answer: dict[str, Any]) -> str:
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def _fetched(http: httpx.Client, decode: ServerProcess) -> int:
    """How often KV came from the other engine."""
    found = re.search(r'transfers_ended_total.*state="fetched"} ([0-9.]+)', http.get(f"{decode.url}/metrics").text)
    return int(float(found[1])) if found else 0


@pytest.mark.parametrize(("path", "body"), ASKED)
def test_the_text_is_that_of_one_engine(
    engines: tuple[ServerProcess, ServerProcess], router: str, path: str, body: dict[str, Any]
) -> None:
    prefill, decode = engines
    body = {**body, "temperature": 0}
    with httpx.Client(timeout=60, trust_env=False) as http:
        before = _fetched(http, decode)
        answer = http.post(router + path, json=body)
        assert answer.status_code == 200, answer.text
        alone = http.post(prefill.url + path, json={**body, "cache_salt": "alone"}).json()
        assert _text(answer.json()) == _text(alone)
        assert _fetched(http, decode) == before + 1


def test_streams_go_through(engines: tuple[ServerProcess, ServerProcess], router: str) -> None:
    path, body = ASKED[0]
    with httpx.Client(timeout=60, trust_env=False) as http:
        alone = http.post(engines[0].url + path, json={**body, "cache_salt": "alone"}).json()
        stream = http.post(router + path, json={**body, "stream": True, "prompt": PROMPT}).text
        events = [line for line in stream.splitlines() if line.startswith("data: {")]
        assert "".join(_text(httpx.Response(200, text=event[6:]).json()) for event in events) == _text(alone)
