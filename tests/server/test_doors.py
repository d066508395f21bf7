"""What stands before the routes: keys, origins, the size of bodies, readiness; and the small routes themselves."""

from __future__ import annotations

import http.client
import json
from dataclasses import asdict
from typing import Any

import httpx
import pytest
from fastapi import APIRouter
from prometheus_client.parser import text_string_to_metric_families

from engine.errors import ConfigError
from engine.messages import Phase
from engine.server.app import create_app
from engine.server.metrics import Metrics
from engine.speculation.controller import Controller
from engine.speculation.counters import DraftCounters

KEYS = ("server.api_keys=[first, sécond]",)


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Bearer firstX", "Basic first"])
def test_a_wrong_key_is_a_401(serving: Any, header: str | None) -> None:
    live = serving(overrides=KEYS)
    headers = {} if header is None else {"Authorization": header}
    for method, path in (("POST", "/v1/completions"), ("GET", "/v1/models"), ("GET", "/metrics"), ("GET", "/docs")):
        response = live.http.request(method, path, headers=headers)
        assert live.error(response, 401)["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("key", ["first", "sécond"])
def test_every_key_opens(serving: Any, key: str) -> None:
    live = serving(overrides=KEYS)
    header = f"Bearer {key}".encode()
    assert live.http.get("/v1/models", headers={b"Authorization": header}).status_code == 200


def test_health_and_preflight_need_no_key(serving: Any) -> None:
    live = serving(overrides=KEYS)
    for path in ("/health", "/health/live", "/health/ready"):
        assert live.http.get(path).status_code == 200
    preflight = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    assert live.http.options("/v1/chat/completions", headers=preflight).status_code == 200
    assert live.http.get("/healthy").status_code == 401


def test_an_empty_key_is_fine_where_none_is_needed(live: Any) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
    connection.request("GET", "/v1/models", headers={"Authorization": "Bearer "})
    assert connection.getresponse().status == 200
    connection.close()


def test_browsers_may_call_from_the_origins_that_are_allowed(serving: Any) -> None:
    live = serving(overrides=("server.cors_origins=[http://good]",))
    for origin, allowed in (("http://good", "http://good"), ("http://evil", None)):
        response = live.http.get("/v1/models", headers={"Origin": origin})
        assert response.headers.get("access-control-allow-origin") == allowed


def test_a_large_body_is_a_413_before_it_is_read(serving: Any) -> None:
    live = serving(overrides=("server.max_body=1000B",))
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(50 * 2**20))
    connection.endheaders()  # and not one byte of the body
    response = connection.getresponse()
    assert response.status == 413
    assert "1000 bytes" in json.loads(response.read())["error"]["message"]
    connection.close()
    assert live.complete("x").status_code == 200


def test_a_client_that_sends_the_large_body_all_the_same_hears_the_413(live: Any) -> None:
    response = live.http.post("/v1/completions", content=b"x" * (50 * 2**20))
    assert live.error(response, 413)["message"].endswith("the most that this server takes")
    assert live.complete("x").status_code == 200


def test_a_large_body_in_chunks_is_a_413_too(serving: Any) -> None:
    live = serving(overrides=("server.max_body=1000B",))
    response = live.http.post("/v1/completions", content=(b"x" * 300 for _ in range(5)))
    live.error(response, 413)
    ok = json.dumps({"prompt": "abc"}).encode()
    assert live.http.post("/v1/completions", content=(ok[i : i + 3] for i in range(0, len(ok), 3))).status_code == 200


def test_unknown_paths_and_methods_have_the_shape_of_errors(live: Any) -> None:
    live.error(live.http.post("/v1/embeddings", json={}), 404)
    live.error(live.http.get("/v1/chat/completions"), 405)


def test_models(live: Any) -> None:
    (card,) = live.http.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == ("tiny", "model", 256)
    assert live.http.get("/v1/models/tiny").json() == card
    live.error(live.http.get("/v1/models/other/one"), 404)


def test_while_loading_the_server_lives_and_is_not_ready(serving: Any) -> None:
    live = serving()
    live.core.ready, live.core.phase = None, Phase("loading weights", 0.4, "12 of 30")
    assert live.http.get("/health/live").status_code == 200
    for path in ("/health", "/health/ready"):
        response = live.http.get(path)
        assert response.status_code == 503
        told = {"status": "loading", "phase": "loading weights", "progress": 0.4, "detail": "12 of 30"}
        assert response.json() == told
    response = live.complete()
    assert "loading weights, 40%" in live.error(response, 503)["message"]
    assert response.headers["retry-after"] == "2"
    assert live.http.get("/v1/models").json()["data"][0]["max_model_len"] is None


def test_without_a_tokenizer_the_server_is_not_ready(serving: Any) -> None:
    live = serving()
    live.state.tokenizer = None
    assert live.http.get("/health/ready").status_code == 503
    live.error(live.chat(), 503)


def test_a_failed_engine_is_not_alive(live: Any) -> None:
    live.core.failed = "out of memory"
    assert live.http.get("/health/live").status_code == 503
    assert live.http.get("/health").json()["status"] == "failed"


def test_metrics_count_what_was_served(live: Any) -> None:
    live.complete(max_tokens=4)
    live.complete(stop=["o"])
    families = list(text_string_to_metric_families(live.http.get("/metrics").text))
    values = {(s.name, s.labels.get("finished_reason")): s.value for f in families for s in f.samples}
    for prefix, finished in (("engine_", "engine_request_success_total"), ("vllm:", "vllm:request_success_total")):
        assert values[f"{prefix}prompt_tokens_total", None] == 6
        assert values[f"{prefix}generation_tokens_total", None] == 4 + 5
        assert values[f"{prefix}time_to_first_token_seconds_count", None] == 2
        assert values[f"{prefix}inter_token_latency_seconds_count", None] == 3 + 4
        assert values[finished, "length"] == values[finished, "stop"] == 1
    assert values["vllm:num_requests_running", None] == 0
    assert values["vllm:kv_cache_usage_perc", None] == 0
    assert {s.labels["model_name"] for f in families for s in f.samples} == {"tiny"}


def test_two_servers_count_apart(serving: Any) -> None:
    one, two = serving(), serving()
    one.complete(max_tokens=1)
    assert 'engine_prompt_tokens_total{model_name="tiny"} 3.0' in one.http.get("/metrics").text
    assert 'engine_prompt_tokens_total{model_name="tiny"} 0.0' in two.http.get("/metrics").text


def test_a_route_of_a_plugin_stands_behind_the_key(serving: Any) -> None:
    router = APIRouter()
    router.add_api_route("/mine", lambda: {"a": 1})
    live = serving(overrides=KEYS, routers=[("mine", router)])
    assert live.http.get("/mine").status_code == 401
    assert live.http.get("/mine", headers={"Authorization": "Bearer first"}).json() == {"a": 1}


def test_a_route_of_a_plugin_may_not_take_our_path(live: Any) -> None:
    router = APIRouter()

    def endpoint() -> None:
        return None

    router.add_api_route("/metrics", endpoint)
    with pytest.raises(ConfigError, match="'greedy', whose path /metrics exists already"):
        create_app(live.state, [("greedy", router)])


def test_http_1_0_and_keep_alive(live: Any) -> None:
    body = json.dumps({"prompt": "abc", "max_tokens": 2}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
    for _ in range(3):
        connection.request("POST", "/v1/completions?api-version=1", body)
        assert json.loads(connection.getresponse().read())["choices"][0]["text"] == "he"
    connection.close()
    old = http.client.HTTPConnection("127.0.0.1", live.port, timeout=10)
    old._http_vsn, old._http_vsn_str = 10, "HTTP/1.0"  # type: ignore[attr-defined]
    old.request("POST", "/v1/completions", body)
    response = old.getresponse()
    assert "transfer-encoding" not in response.headers
    assert json.loads(response.read())["choices"][0]["text"] == "he"
    old.close()


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "Application/JSON; charset=utf-8"])
def test_the_content_type_does_not_matter(live: Any, kind: str) -> None:
    response = live.http.post("/v1/completions", content=b'{"prompt": "a"}', headers={"Content-Type": kind})
    assert response.status_code == 200


def test_the_version(live: Any) -> None:
    assert isinstance(httpx.get(f"{live.base}/version", trust_env=False).json()["version"], str)


def test_draft_counters_show_when_there_is_a_speculator() -> None:
    cache = dict.fromkeys(("held", "lookup_tokens", "hit_tokens", "evicted_pages"), 0) | {"pages": 8}
    core = {
        "kv_cache": cache,
        "preemptions": 0,
        "steps": 9,
        "drafts": {},
        "transfers": [],
        "transfers_ended": {"delivered": 2},
    }
    assert b"spec_decode" not in Metrics("tiny").expose(0, 0, core)
    counters = DraftCounters(4)
    for accepted in (4, 2, 1, 0, 0):
        counters.count(300, 4, accepted)
    counters.faults = 1
    core["drafts"] = {**asdict(counters), "controller": Controller(4, 0.01).stats()}
    text = Metrics("tiny").expose(0, 0, core).decode()
    assert 'engine_spec_decode_num_draft_tokens_total{model_name="tiny"} 20.0' in text
    assert 'vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="tiny"} 7.0' in text
    assert 'engine_spec_decode_faults_total{model_name="tiny"} 1.0' in text
    assert 'engine_spec_decode_num_wasted_tokens_total{model_name="tiny"} 13.0' in text
    assert 'engine_spec_decode_acceptance_length{model_name="tiny"} 2.4' in text
    per_place = 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="tiny",position="1"} 2.0'
    assert per_place in text
    assert 'engine_spec_decode_context_accepted_tokens_total{context="256-1023",model_name="tiny"} 7.0' in text
    assert 'engine_spec_decode_state{model_name="tiny",state="off"} 1.0' in text
    assert 'engine_spec_decode_state{model_name="tiny",state="on"} 0.0' in text
    assert 'engine_spec_decode_alarm{model_name="tiny"} 0.0' in text
    core["drafts"] = {**core["drafts"], "controller": {}}  # drafts of one length
    assert b"spec_decode_state" not in Metrics("tiny").expose(0, 0, core)
    assert 'engine_kv_transfers_ended_total{model_name="tiny",state="delivered"} 2.0' in text
