"""What a finished request can be asked, over HTTP and with `engine why`."""

from __future__ import annotations

import json
from threading import Thread
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from engine.messages import FinishReason, Output, Timing
from engine.server.cli.endpoint import EndpointError
from engine.server.cli.why import command
from engine.server.exchange import Exchange, Run
from engine.server.journal import account
from engine.testing.client import say

TIMING = Timing(queue=1.0, prefill=2.0, decode=4.0, preemptions=2, preempted=0.5, stalled=1.5, steps=3)


def slow(call: Any) -> list[Output]:
    first = Output("", token_ids=[104], cached_tokens=2)
    return [first, Output("", token_ids=[105], finish_reason=FinishReason.LENGTH, timing=TIMING)]


def exchange(**fields: Any) -> Exchange:
    made = Exchange(id="x", path="/v1/completions", arrived=100.0, **fields)
    run = Run("run-0", 10, 100.25, first=103.5, last=107.0, ended=107.3, tokens=4, cached_tokens=6, timing=TIMING)
    made.runs, made.ended, made.status = [run], 107.5, 200
    return made


def test_the_parts_add_up_and_the_stalls_are_taken_out_of_the_decode() -> None:
    found = account(exchange())
    assert found["total_seconds"] == 7.5
    assert found["first_token_seconds"] == 3.5
    parts = {part["part"]: part["seconds"] for part in found["parts"]}
    assert parts == {
        "prepare": 0.25, "queue": 1.0, "prefill": 2.0, "decode": 2.0, "stalled": 1.5, "preempted": 0.5, "deliver": 0.25,
    }  # fmt: skip
    about = {part["part"]: part["about"] for part in found["parts"]}
    assert about["prefill"] == "4 prompt tokens computed, 6 cached"
    assert "2 preemptions" in about["preempted"]


def test_a_request_preempted_while_it_prefilled_adds_up_too() -> None:
    made = exchange()
    made.runs[0].timing = Timing(queue=1.0, prefill=5.0, decode=1.0, preemptions=1, preempted=4.0, steps=3)
    parts = {part["part"]: part["seconds"] for part in account(made)["parts"]}
    assert (parts["prefill"], parts["decode"], parts["preempted"]) == (2.0, 0.0, 4.0)
    assert sum(parts.values()) == pytest.approx(7.5)


def test_without_the_cores_account_the_engine_is_one_part() -> None:
    made = exchange()
    made.runs[0].timing = None
    parts = {part["part"]: part["seconds"] for part in account(made)["parts"]}
    assert parts == pytest.approx({"prepare": 0.25, "engine": 7.05, "deliver": 0.2})


def test_a_request_is_known_by_each_of_its_names(serving: Any) -> None:
    live = serving(slow)
    response = live.http.post(
        "/v1/completions", json={"model": "tiny", "prompt": "abc"}, headers={"X-Request-Id": "my-own"}
    )
    assert response.headers["x-request-id"] == "my-own"
    assert response.json()["id"] == "cmpl-my-own"
    for name in ("my-own", "cmpl-my-own", live.core.calls[0].request_id):
        found = live.http.get(f"/requests/{name}").json()
        assert found["request_id"] == "my-own"
        assert (found["status"], found["prompt_tokens"], found["cached_tokens"], found["output_tokens"]) == (
            200,
            3,
            2,
            2,
        )
        assert sum(part["seconds"] for part in found["parts"]) >= 7.0  # the scripted core's words
    live.error(live.http.get("/requests/own"), 404)


def test_a_request_that_a_stop_string_ended_has_an_account_too(serving: Any) -> None:
    def talk(call: Any) -> list[Output]:
        first = Output("", token_ids=[104], timing=Timing(queue=0.25, prefill=0.5, decode=0.0))
        return [first, *(Output("", token_ids=[token]) for token in b"ello world")]

    live = serving(talk)
    name = live.complete(stop=["wor"]).json()["id"]
    parts = {part["part"]: part["seconds"] for part in live.http.get(f"/requests/{name}").json()["parts"]}
    assert (parts["queue"], parts["prefill"]) == (0.25, 0.5)
    assert parts["decode"] > 0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "model": "tiny"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/responses", {"input": "a", "background": True}),
    ],
)
def test_the_id_in_an_answer_leads_to_its_request(serving: Any, path: str, body: dict[str, Any]) -> None:
    live = serving(slow)
    response = live.http.post(path, json=body)
    assert response.status_code == 200, response.text
    live.until(lambda: not live.state.active)
    found = live.http.get(f"/requests/{response.json()['id']}").json()
    assert found["request_id"] == response.headers["x-request-id"]
    assert found["output_tokens"] == 2


@pytest.mark.parametrize("given", ["", "a b", "x" * 129, "a\tb", "<script>"])
def test_an_odd_id_is_replaced(live: Any, given: str) -> None:
    response = live.http.get("/v1/models", headers={"X-Request-Id": given})
    assert len(response.headers["x-request-id"]) == 32


def test_every_answer_has_an_id_even_a_refusal(serving: Any) -> None:
    live = serving(overrides=("server.api_keys=[k]", "server.max_body=1000B"))
    for path, headers in (("/nowhere", {}), ("/v1/models", {}), ("/health", {}), ("/v1/models", {"x-api-key": "k"})):
        assert live.http.get(path, headers=headers).headers["x-request-id"]


def test_a_key_sees_its_own_requests_and_an_administrator_all(serving: Any) -> None:
    keys = "server.api_keys=[{key: a, name: alice}, {key: b, name: bob}, {key: r, scopes: [infer, admin]}]"
    live = serving(slow, overrides=(keys,))
    headers = {"Authorization": "Bearer a", "X-Request-Id": "hers"}
    live.http.post("/v1/completions", json={"prompt": "abc"}, headers=headers)
    seen = {key: live.http.get("/requests/hers", headers={"Authorization": f"Bearer {key}"}) for key in "abr"}
    assert {key: response.status_code for key, response in seen.items()} == {"a": 200, "b": 404, "r": 200}
    assert seen["r"].json()["key"] == "alice"


def test_the_oldest_make_room(serving: Any) -> None:
    live = serving(overrides=("server.kept_requests=2",))
    for name in "abc":
        live.http.post("/v1/completions", json={"prompt": "abc"}, headers={"X-Request-Id": name})
    assert [live.http.get(f"/requests/{name}").status_code for name in "abc"] == [404, 200, 200]


def test_a_running_request_is_not_told_of_yet(serving: Any) -> None:
    live = serving(say(list(b"xyz")))
    live.call(live.core.gate.clear)
    body, headers = {"prompt": "abc", "max_tokens": 5}, {"X-Request-Id": "r"}
    asking = Thread(target=lambda: httpx.post(f"{live.base}/v1/completions", json=body, headers=headers, timeout=20))
    asking.start()
    live.until(lambda: live.core.calls)
    assert "still running" in live.error(live.http.get("/requests/r"), 404)["message"]
    live.call(live.core.gate.set)
    asking.join(20)
    live.until(lambda: not live.state.active)
    assert live.http.get("/requests/r").json()["choices"][0]["reason"] == "length"


def test_engine_why_draws_the_parts(serving: Any) -> None:
    live = serving(slow)
    live.http.post("/v1/completions", json={"prompt": "abc"}, headers={"X-Request-Id": "r"})
    result = CliRunner().invoke(command, ["cmpl-r", "--url", live.base])
    assert result.exit_code == 0, result.output
    assert "3 prompt tokens (2 cached), 2 output" in result.output
    assert "stalled" in result.output
    assert "█" in result.output
    as_json = json.loads(CliRunner().invoke(command, ["r", "--url", live.base, "--json"]).output)
    assert as_json["request_id"] == "r"


def test_engine_why_of_an_unknown_request_is_a_sentence(live: Any) -> None:
    result = CliRunner().invoke(command, ["../nothing", "--url", live.base])
    assert isinstance(result.exception, EndpointError)
    assert "404" in str(result.exception)


def test_the_stretches_are_metrics(serving: Any) -> None:
    live = serving(slow)
    live.complete()
    text = live.http.get("/metrics").text
    for name, value in (("queue", 1.0), ("prefill", 2.0), ("decode", 4.0), ("inference", 6.0)):
        assert f'vllm:request_{name}_time_seconds_sum{{engine="0",model_name="tiny"}} {value}' in text
    assert 'engine_request_stalled_time_seconds_sum{model_name="tiny"} 1.5' in text
    assert 'engine_http_responses_total{model_name="tiny",status="200"} 1.0' in text
