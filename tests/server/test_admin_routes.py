"""The operator's routes under /engine/."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from engine.config.explain import explain
from engine.config.load import load_config
from engine.messages import FinishReason, Output, Ready, Timing
from engine.registry import Registry
from engine.testing.client import Call

ADMIN = {"Authorization": "Bearer root"}
OVERRIDES = ("server.api_keys=[{key: root, name: root, scopes: [admin, infer]}, {key: user-key, name: user}]",)


@pytest.fixture
def operated(serving: Any) -> Any:
    live = serving(overrides=OVERRIDES)
    live.http.headers.update(ADMIN)
    return live


@pytest.fixture
def held(operated: Any) -> Iterator[Any]:
    """A server whose core says nothing until the gate opens."""
    operated.call(operated.core.gate.clear)
    yield operated
    operated.call(operated.core.gate.set)


class Asking(threading.Thread):
    """A completion on a thread of its own."""

    def __init__(self, live: Any, name: str, **fields: Any) -> None:
        super().__init__()
        self._live, self._fields, self._name = live, fields, name
        self.response: httpx.Response | None = None
        before = len(live.core.calls)
        self.start()
        live.until(lambda: len(live.core.calls) > before)

    def run(self) -> None:
        body = {"model": "tiny", "prompt": "abc", **self._fields}
        headers = {**ADMIN, "X-Request-Id": self._name}
        url = f"{self._live.base}/v1/completions"
        self.response = httpx.post(url, json=body, headers=headers, timeout=20, trust_env=False)

    def answer(self) -> httpx.Response:
        self.join(20)
        assert self.response is not None
        return self.response


def test_the_composition_is_what_the_core_said(operated: Any) -> None:
    operated.core.ready = Ready(256, 64, 16, 4, 8, {"parts": {"attention": {"name": "reference"}}})
    found = operated.http.get("/engine/composition").json()
    assert found["parts"]["attention"]["name"] == "reference"
    assert (found["max_context"], found["num_pages"], found["page_size"]) == (256, 64, 16)
    operated.core.ready = None
    operated.error(operated.http.get("/engine/composition"), 503)


def test_the_configuration_has_origins_and_no_secret(operated: Any) -> None:
    loaded = load_config(None, [*OVERRIDES, "server.max_n=7"])
    operated.state.settings = explain(loaded, Registry.discover())
    response = operated.http.get("/engine/config")
    config = response.json()["config"]
    assert config["server.max_n"] == {"value": "7", "origin": "--set server.max_n"}
    assert config["server.api_keys.0.key"]["value"] == "********"
    assert config["server.api_keys.1.name"]["value"] == '"user"'
    assert "root-key" not in response.text
    assert "user-key" not in response.text


def test_prompts_and_fetches_are_measured(serving: Any) -> None:
    timing = Timing(queue=1.0, prefill=0.25, decode=0.0)

    def script(call: Call) -> list[Output]:
        return [Output("", token_ids=[65], cached_tokens=1, timing=timing, finish_reason=FinishReason.LENGTH)]

    live = serving(script, (*OVERRIDES, "kv_connectors=[local]"))
    live.http.headers.update(ADMIN)
    told = live.http.get("/engine/transfer").json()
    assert (told["prefill"]["points"], told["bytes_per_second"], told["open"]) == ([], None, [])
    live.complete("abcde")
    live.complete("abcdefgh", kv_transfer_params={"do_remote_prefill": True, "handle": {}})  # not computed here
    assert live.http.get("/engine/transfer").json()["prefill"]["points"] == [[4, 0.25]]


def test_leases_and_flush_ask_the_core(operated: Any) -> None:
    assert operated.http.get("/engine/leases").json() == {"leases": []}
    assert operated.http.get("/engine/speculation").json() == {}
    assert operated.http.post("/engine/flush").json() == {"pages": 3}
    assert [verb for verb, _ in operated.core.controls] == ["stats", "speculation", "reset_cache"]


def test_draining_can_be_taken_back(held: Any) -> None:
    running = Asking(held, "first", max_tokens=3)
    assert held.http.post("/engine/drain").json() == {"draining": True, "active": 1}
    assert held.http.get("/health/ready").status_code == 503
    assert held.http.get("/health/live").status_code == 200
    refused = held.complete()
    assert "is draining and takes no new requests" in held.error(refused, 503)["message"]
    assert int(refused.headers["retry-after"]) >= 1
    held.call(held.core.gate.set)
    assert running.answer().status_code == 200
    for _ in range(500):  # the client may have its answer a moment before the server has put it away
        resumed = held.http.post("/engine/drain", json={"drain": False}).json()
        if not resumed["active"]:
            break
    assert resumed == {"draining": False, "active": 0}
    assert held.complete().status_code == 200


def test_a_shutdown_can_not_be_taken_back(operated: Any) -> None:
    operated.state.draining = operated.state.stopping = True
    operated.error(operated.http.post("/engine/drain", json={"drain": False}), 409)


@pytest.mark.parametrize("stream", [False, True])
def test_abort_ends_the_request_it_names_and_no_other(held: Any, stream: bool) -> None:
    doomed, other = Asking(held, "doomed", stream=stream), Asking(held, "other", max_tokens=3)
    assert held.http.post("/engine/abort", json={"request_id": "cmpl-doomed"}).json() == {"aborted": 1}
    response = doomed.answer()
    assert held.error(response, 403)["message"] == "an administrator ended this request"
    held.until(lambda: held.core.aborted == [held.core.calls[0].request_id])
    held.call(held.core.gate.set)
    assert other.answer().json()["choices"][0]["text"] == "hel"
    assert held.error(held.http.post("/engine/abort", json={"request_id": "doomed"}), 404)["param"] == "request_id"


def test_abort_takes_the_id_of_a_choice_or_all(held: Any) -> None:
    one, two, three = (Asking(held, name) for name in "abc")
    choice = held.core.calls[1].request_id
    assert held.http.post("/engine/abort", json={"request_id": choice}).json() == {"aborted": 1}
    assert two.answer().status_code == 403
    assert held.http.post("/engine/abort", json={"all": True}).json() == {"aborted": 2}
    assert {one.answer().status_code, three.answer().status_code} == {403}
    for body in ({}, {"all": True, "request_id": "a"}):
        held.error(held.http.post("/engine/abort", json=body))


def test_the_log_level_changes_in_both_processes(operated: Any) -> None:
    logger = logging.getLogger("engine")
    before = logger.level
    try:
        assert operated.http.post("/engine/log-level", json={"level": "debug"}).json() == {"level": "debug"}
        assert logger.level == logging.DEBUG
        assert operated.core.controls == [("log_level", {"level": "debug"})]
        assert operated.http.get("/engine/log-level").json() == {"level": "debug"}
        operated.error(operated.http.post("/engine/log-level", json={"level": "loud"}))
    finally:
        logger.setLevel(before)


def test_nothing_of_it_is_for_other_keys(operated: Any) -> None:
    for method, path in (("POST", "/engine/abort"), ("POST", "/engine/drain"), ("GET", "/engine/config")):
        response = operated.http.request(method, path, headers={"Authorization": "Bearer user-key"})
        operated.error(response, 403)
    assert operated.http.get("/health/ready").status_code == 200
