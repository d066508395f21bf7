"""The request log through the shared suite, and its lines."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engine.errors import ResourceError
from engine.plugins.observers import request_log
from engine.plugins.observers.request_log import observer as module_under_test
from engine.specs.observer import Stage
from engine.testing.observer import ObserverConformance, event, life


class TestRequestLog(ObserverConformance):
    (offer,) = request_log.observers()
    module = "engine.plugins.observers.request_log"


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "requests.jsonl"


def test_a_finished_request_is_one_line(path: Path) -> None:
    log = request_log.build(request_log.RequestLogOptions(path=str(path)))
    start = time.monotonic()
    *events, end = life("a", start)
    log.receive(events)
    assert path.read_text() == ""
    log.receive([end])
    (line,) = lines(path)
    finished = datetime.fromisoformat(line.pop("finished"))
    assert abs((finished - datetime.now(UTC)).total_seconds() - 3.5) < 60
    assert line == {
        "request": "a",
        "reason": "stop",
        "prompt_tokens": 100,
        "cached_tokens": 64,
        "output_tokens": 9,
        "preemptions": 1,
        "queue_seconds": 0.5,
        "prefill_seconds": 1.0,
        "decode_seconds": 2.0,
    }
    log.close()


def test_stretches_that_were_not_reached_are_null(path: Path) -> None:
    log = request_log.build(request_log.RequestLogOptions(path=str(path)))
    log.receive([event(Stage.QUEUED, "queued", 1.0), event(Stage.FINISHED, "queued", 4.0, reason="abort")])
    log.receive([*life("prefilling")[:2], event(Stage.FINISHED, "prefilling", 0.75, reason="abort")])
    log.receive([event(Stage.FINISHED, "unknown", 4.0, reason="error")])
    log.close()
    spans = [[line[f"{span}_seconds"] for span in ("queue", "prefill", "decode")] for line in lines(path)]
    assert spans == [[3.0, None, None], [0.5, 0.25, None], [None, None, None]]


def test_lines_are_appended(path: Path) -> None:
    for name in "ab":
        log = request_log.build(request_log.RequestLogOptions(path=str(path)))
        log.receive(life(name))
        log.close()
    assert [line["request"] for line in lines(path)] == ["a", "b"]


def test_without_a_path_lines_go_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    log = request_log.build(request_log.RequestLogOptions())
    log.receive(life("a"))
    log.close()
    log.receive(life("b"))  # stderr is not ours to close
    written = capsys.readouterr().err.splitlines()
    assert [json.loads(line)["request"] for line in written] == ["a", "b"]


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match=r"can't write to '.*nowhere/log': No such file or directory"):
        request_log.build(request_log.RequestLogOptions(path=str(tmp_path / "nowhere" / "log")))


def test_requests_whose_end_was_lost_do_not_pile_up(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module_under_test, "MOST_OPEN", 3)
    log = request_log.build(request_log.RequestLogOptions(path=str(path)))
    for number in range(10):
        log.receive(life(f"r{number}")[:3])
    assert len(log._lives) == 3
    log.receive([event(Stage.FINISHED, "r9", 3.5, 9, "stop")])
    log.close()
    assert lines(path)[0]["decode_seconds"] == 2.0
