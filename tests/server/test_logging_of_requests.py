"""Logs: JSON lines, one per request if wanted, and never a word of what was said."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from engine.logs import JsonFormatter
from engine.server.errors import ApiError
from engine.server.exchange import log_fields

SECRET = "aquamarine-walrus"


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """Everything that the server and its libraries log, down to debug, as JSON."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter("http"))
    handler.addFilter(lambda record: not record.name.startswith(("httpx", "httpcore")))  # the client of the test
    root, ours = logging.getLogger(), logging.getLogger("engine")
    before = root.level, ours.level
    root.addHandler(handler)
    root.setLevel("DEBUG")
    ours.setLevel("DEBUG")
    yield stream
    root.removeHandler(handler)
    root.setLevel(before[0])
    ours.setLevel(before[1])


def parsed(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_per_request(serving: Any, lines: io.StringIO) -> None:
    live = serving(overrides=("logging.requests=true", "server.api_keys=[{key: k, name: kim}]"))
    headers = {"Authorization": "Bearer k", "X-Request-Id": "r1"}
    live.http.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4, "n": 2}, headers=headers)
    live.http.get("/health")
    live.http.get("/v1/models?api_key=hunter2")
    live.until(lambda: len([line for line in parsed(lines) if "request_id" in line]) == 2)
    one, two = (line for line in parsed(lines) if "request_id" in line)
    assert (one["request_id"], one["key"], one["method"], one["path"]) == ("r1", "kim", "POST", "/v1/completions")
    assert (one["status"], one["choices"], one["prompt_tokens"], one["output_tokens"]) == (200, 2, 6, 8)
    assert (one["level"], one["process"], one["logger"]) == ("info", "http", "engine.server.journal")
    assert one["seconds"] > 0
    assert (two["status"], two["key"]) == (401, "")
    assert "hunter2" not in lines.getvalue()


def test_no_line_per_request_unless_asked_for(live: Any, lines: io.StringIO) -> None:
    live.complete()
    assert not [line for line in parsed(lines) if "request_id" in line]


def test_a_path_can_not_forge_lines(serving: Any, lines: io.StringIO) -> None:
    live = serving(overrides=("logging.requests=true",))
    live.http.get("/a%0aFAKE%20LINE")
    live.until(lambda: "FAKE" in lines.getvalue())
    assert "\nFAKE" not in "".join(line["message"] for line in parsed(lines))


def test_nothing_that_was_said_is_logged(serving: Any, lines: io.StringIO) -> None:
    live = serving(overrides=("logging.requests=true", "logging.level=debug"))
    live.chat(SECRET)
    live.complete(SECRET, stop=[SECRET], user=SECRET)
    live.complete(SECRET * 50)  # too long
    live.chat(SECRET, stream=True)
    live.complete(SECRET, model=SECRET)
    live.complete(SECRET, temperature=SECRET)
    live.http.post("/v1/completions", content=f'{{"prompt": "{SECRET}"')
    live.http.post("/tokenize", json={"prompt": SECRET})

    def broken(call: Any) -> list[Any]:
        raise RuntimeError("the core is confused")

    live.core.script = broken
    assert live.complete(SECRET).status_code == 500
    live.until(lambda: "confused" in lines.getvalue())  # the traceback is there
    assert 'status="500"' in live.http.get("/metrics").text
    assert len([line for line in parsed(lines) if "request_id" in line]) == 9
    assert SECRET not in lines.getvalue()


def test_a_traceback_is_one_line_of_json() -> None:
    try:
        raise ApiError(500, "broken\nin two")
    except ApiError:
        record = logging.LogRecord("engine.x", logging.ERROR, "f", 1, "it %s", ("failed",), sys.exc_info())
    text = JsonFormatter("core").format(record)
    assert "\n" not in text
    found = json.loads(text)
    assert (found["message"], found["process"], found["level"]) == ("it failed", "core", "error")
    assert "in two" in found["error"]


def test_configure_writes_to_stderr_in_the_form_that_was_asked_for() -> None:
    code = """
import logging
from engine.logs import configure
for form in ("text", "json"):
    configure("info", form, "http")
    logging.getLogger("engine.x").info("ours")
    logging.getLogger("uvicorn").info("not theirs")
    logging.getLogger("uvicorn").warning("theirs")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == ""
    first, second, third, fourth = done.stderr.splitlines()
    assert first.endswith("I engine.x: ours")
    assert second.endswith("W uvicorn: theirs")
    assert [json.loads(line)["message"] for line in (third, fourth)] == ["ours", "theirs"]


def test_lines_written_for_a_request_name_it(serving: Any, lines: io.StringIO) -> None:
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, JsonFormatter):
            handler.setFormatter(JsonFormatter("http", log_fields))

    def broken(call: Any) -> list[Any]:
        raise RuntimeError("the core is confused")

    live = serving(broken)
    response = live.http.post("/v1/completions", json={"prompt": "abc"}, headers={"X-Request-Id": "r7"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "r7"
    live.until(lambda: "confused" in lines.getvalue())
    (line,) = (line for line in parsed(lines) if "confused" in line.get("error", ""))
    assert line["request_id"] == "r7"
