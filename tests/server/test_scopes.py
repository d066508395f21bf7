"""Keys and their scopes, over every route that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import APIRouter
from fastapi.routing import APIRoute
from starlette.routing import Route

from engine.errors import ConfigError
from engine.server.keys import KeyRing, scope_of

KEYS = (
    "server.api_keys=[{key: i, name: user, scopes: [infer]}, {key: m, name: prometheus, scopes: [metrics]},"
    " {key: a, name: operator, scopes: [admin]}, {key: none, scopes: []}, plain]",
)


def plugin() -> APIRouter:
    router = APIRouter()
    router.add_api_route("/mine", lambda: {"a": 1})
    router.add_api_route("/engine/mine", lambda: {"a": 1}, methods=["POST"])
    return router


def doors(live: Any) -> Iterator[tuple[str, str]]:
    """Method and path of every route, the documentation and those of plugins included."""
    pending = list(live.app.routes)
    for route in pending:
        if isinstance(route, APIRoute | Route):
            for method in sorted(route.methods or {"GET"}):
                yield method, re.sub(r"{[^}]*}", "x", route.path)
        else:
            pending += getattr(getattr(route, "original_router", None) or route, "routes", [])


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_route_asks_for_the_scope_of_its_path(serving: Any) -> None:
    live = serving(overrides=KEYS, routers=[("plugin", plugin())])
    seen = list(doors(live))
    paths = {path for _, path in seen}
    assert {"/mine", "/engine/mine", "/docs", "/openapi.json", "/metrics", "/v1/models/x"} <= paths
    opens = {"infer": "i", "metrics": "m", "admin": "a"}
    for method, path in seen:
        if path.startswith("/health"):
            assert live.http.request(method, path).status_code == 200
            continue
        scope = "metrics" if path in ("/metrics", "/load") else "admin" if path.startswith("/engine/") else "infer"
        assert live.http.request(method, path).status_code == 401, path
        assert live.http.request(method, path, headers=bearer("wrong")).status_code == 401, path
        assert live.http.request(method, path, headers=bearer("none")).status_code == 403, path
        for name, key in opens.items():
            status = live.http.request(method, path, headers=bearer(key)).status_code
            assert (status not in (401, 403)) == (name == scope), (path, name, status)
        assert live.http.request(method, path, headers=bearer("plain")).status_code != 401


def test_without_keys_all_is_open_but_what_administrators_do(serving: Any) -> None:
    live = serving(routers=[("plugin", plugin())])
    for method, path in doors(live):
        response = live.http.request(method, path)
        assert response.status_code != 401
        assert (response.status_code == 403) == path.startswith("/engine/"), path
    said = live.error(live.http.get("/engine/config"), 403)["message"]
    assert "name a key with the scope admin in server.api_keys" in said


@pytest.mark.parametrize("path", ["/engine", "/engine/", "/%65ngine/config", "/engine/config/", "/engine/../engine/x"])
def test_no_spelling_of_a_path_opens_an_administrators_door(serving: Any, path: str) -> None:
    live = serving(overrides=KEYS)
    assert live.http.get(path, headers=bearer("i")).status_code in (403, 404)
    assert live.http.get("/engine/config", headers=bearer("i")).status_code == 403


def test_a_refusal_says_what_the_key_has(serving: Any) -> None:
    live = serving(overrides=KEYS)
    error = live.error(live.http.get("/metrics", headers=bearer("i")), 403)
    assert error["message"] == "/metrics takes a key with the scope metrics; 'user' has infer"
    assert (error["type"], error["code"]) == ("permission_error", "insufficient_scope")


def test_a_key_may_come_as_anthropics_clients_send_it(serving: Any) -> None:
    live = serving(overrides=KEYS)
    assert live.http.get("/v1/models", headers={"x-api-key": "i"}).status_code == 200
    assert live.http.get("/v1/models", headers={"x-api-key": "wrong"}).status_code == 401


def test_plain_keys_infer_and_see_metrics(serving: Any) -> None:
    live = serving(overrides=KEYS)
    for path, status in (("/v1/models", 200), ("/metrics", 200), ("/engine/config", 403)):
        assert live.http.get(path, headers=bearer("plain")).status_code == status


def test_two_keys_of_one_text_or_name_are_refused(serving: Any) -> None:
    from engine.config.load import load_config

    for keys, what in (("[a, b, a]", "text"), ("[{key: a, name: n}, {key: b, name: n}]", "name")):
        with pytest.raises(ConfigError, match=f"have the same {what}"):
            KeyRing(load_config(None, [f"server.api_keys={keys}"]).config.server.api_keys)


def test_paths_that_only_look_like_health_checks_are_guarded() -> None:
    assert scope_of("/health/live") is None
    assert [scope_of(path) for path in ("/healthy", "/metrics/x", "/loads", "/engines")] == ["infer"] * 4
