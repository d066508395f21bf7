"""`engine batch`: every request gets one line, however often the work is cut short."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from engine.server.batch import Batch, Post, Reply, Tally
from engine.server.batch_files import Answers, BatchError, read_ids
from engine.server.cli.batch import command

CHAT: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
OK = Reply(status=200, body=b'{"fine":true}')


def line(name: str, url: str = "/v1/chat/completions", **more: Any) -> dict[str, Any]:
    return {"custom_id": name, "method": "POST", "url": url, "body": CHAT, **more}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(*lines: dict[str, Any]) -> Path:
        path = tmp_path / "in.jsonl"
        path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
        return path

    return make


def read(path: Path) -> dict[str, dict[str, Any]]:
    answers = [json.loads(text) for text in path.read_text().splitlines()]
    by_id = {answer["custom_id"]: answer for answer in answers}
    assert len(by_id) == len(answers), "an id was answered twice"
    return by_id


def answer(source: Path, post: Post, concurrency: int = 3) -> Tally:
    with Answers(source.with_name("out.jsonl")) as file:
        return asyncio.run(Batch(source, file, post, file.read_ids()).run(concurrency))


def engine_batch(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_all_kinds_of_requests_over_a_server(write: Callable[..., Path], live: Any, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    source = write(
        line("chat"),
        line("text", "/v1/completions", body={"model": "tiny", "prompt": "a", "max_tokens": 4}),
        line("bad", body={**CHAT, "temperature": -1}),
        line("stream", body={**CHAT, "stream": True}),
        line("method", method="GET"),
        line("path", "/metrics"),
        line("empty", body=None),
    )
    result = engine_batch(source, out, "--url", f"{live.base}/v1")
    assert result.exit_code == 1
    assert "2 answered, 5 failed, 0 had an answer already" in result.stderr
    answers = read(out)
    assert answers["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    assert answers["text"]["response"]["body"]["choices"][0]["text"] == "hell"
    assert answers["bad"]["response"]["status_code"] == 400
    assert answers["bad"]["error"] is None
    for name, words in {"stream": "stream is not", "method": "'GET'", "path": "'/metrics'", "empty": "body is"}.items():
        assert answers[name]["response"] is None
        assert words in answers[name]["error"]["message"]
    again = engine_batch(source, out, "--url", "http://127.0.0.1:9")
    assert again.exit_code == 0, "there is nothing left to ask"
    assert "7 had an answer already" in again.stderr


def test_a_killed_batch_goes_on_where_it_was(
    write: Callable[..., Path], serving: Callable[..., Any], tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    source = write(*(line(f"r{i}") for i in range(20)))
    live = serving()
    live.call(live.core.gate.clear)
    program = [sys.executable, "-c", "from engine.server.cli.main import main; main()"]
    arguments = ["batch", str(source), str(out), "--url", live.base, "--concurrency", "2"]
    process = subprocess.Popen([*program, *arguments], stderr=subprocess.DEVNULL)
    try:
        live.until(lambda: len(live.core.calls) == 2)
        live.call(live.core.gate.set)
        live.until(lambda: len(live.core.calls) > 6)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    with out.open("ab") as file:
        file.write(b'{"id":"batch_req_x","custom_id":"r1')  # what a kill in the middle of a write leaves
    before = out.read_bytes().rpartition(b"\n")[0]
    assert before
    result = engine_batch(source, out, "--url", live.base)
    assert result.exit_code == 0, result.stderr
    assert out.read_bytes().startswith(before)
    assert set(read(out)) == {f"r{i}" for i in range(20)}


def test_no_more_are_asked_at_once_than_allowed(write: Callable[..., Path]) -> None:
    running, most = 0, 0

    async def post(path: str, body: bytes) -> Reply:
        nonlocal running, most
        running, most = running + 1, max(most, running + 1)
        await asyncio.sleep(0.001)
        running -= 1
        return OK

    assert answer(write(*(line(f"r{i}") for i in range(10))), post, concurrency=3).answered == 10
    assert most == 3


def test_a_busy_server_is_asked_again(write: Callable[..., Path]) -> None:
    replies = [Reply(status=429, body=b"{}", retry_after=0), Reply(status=503, body=b"{}", retry_after=0), OK]

    async def post(path: str, body: bytes) -> Reply:
        return replies.pop(0)

    source = write(line("a"))
    assert answer(source, post).answered == 1
    assert read(source.with_name("out.jsonl"))["a"]["response"]["body"] == {"fine": True}


def test_a_server_that_is_gone_ends_the_batch_and_keeps_what_was_answered(write: Callable[..., Path]) -> None:
    count = 0

    async def post(path: str, body: bytes) -> Reply:
        nonlocal count
        count += 1
        if count > 2:
            raise BatchError("nobody there")
        return OK

    source = write(*(line(f"r{i}") for i in range(5)))
    with pytest.raises(BatchError, match="nobody there"):
        answer(source, post, concurrency=1)
    assert set(read(source.with_name("out.jsonl"))) == {"r0", "r1"}
    count = -100
    assert answer(source, post).answered == 3


def test_an_answer_that_is_no_json_is_kept_as_text(write: Callable[..., Path]) -> None:
    async def post(path: str, body: bytes) -> Reply:
        return Reply(status=502, body=b"<html>")

    source = write(line("a"))
    assert answer(source, post).failed == 1
    assert read(source.with_name("out.jsonl"))["a"]["response"]["body"] == "<html>"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"custom_id": "a"}\n{"custom_id": "a"}\n', r":2: the custom_id 'a' stands there a second time"),
        ('{"custom_id": "a"}\n{"id": "b"}\n', ":2: not a request of a batch: .*`custom_id`"),
        ("[1]\n", ":1: not a request of a batch"),
        ('{"custom_id": ', ":1: not a request of a batch"),
    ],
)
def test_a_file_whose_answers_could_not_be_told_apart_is_refused(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "in.jsonl").write_text(text)
    with pytest.raises(BatchError, match=words):
        read_ids(tmp_path / "in.jsonl")


def test_a_file_that_holds_something_else_is_not_touched(write: Callable[..., Path], tmp_path: Path) -> None:
    source, other = write(line("a")), tmp_path / "other"
    other.write_text("my diary\n")
    assert isinstance(engine_batch(source, other, "--url", "x").exception, BatchError)
    assert other.read_text() == "my diary\n"
    other.write_text('{"custom_id": "z"}\n')
    assert "answers 'z', which is not in" in str(engine_batch(source, other, "--url", "x").exception)


def test_one_process_at_a_time_writes_answers(tmp_path: Path) -> None:
    with Answers(tmp_path / "out"), pytest.raises(BatchError, match="another process is writing"):
        Answers(tmp_path / "out").__enter__()


def test_a_server_takes_no_configuration_from_here(write: Callable[..., Path], tmp_path: Path) -> None:
    result = engine_batch(write(line("a")), tmp_path / "out", "--url", "x", "--set", "a=1")
    assert result.exit_code == 2
    assert "--url uses a server as it is" in result.stderr


@pytest.mark.slow
def test_an_engine_of_its_own_needs_no_key(write: Callable[..., Path], tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "Repeat after me: the cat sat on the mat."}], "temperature": 0}
    source, out = write(line("a", body=chat)), tmp_path / "out.jsonl"
    result = engine_batch(source, out, "--set", "server.api_keys=[secret]")
    assert result.exit_code == 0, result.stderr
    assert read(out)["a"]["response"]["body"]["choices"][0]["message"]["content"] == "The cat sat on the mat."
