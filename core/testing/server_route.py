"""Conformance of server routes: a router whose paths can be mounted beside the built-in ones."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from engine.testing.offer import OfferConformance

TAKEN = ("/v1/chat/completions", "/v1/completions", "/v1/models", "/health/live", "/health/ready", "/metrics")
"""Some paths of the server itself; one that exists is refused at start."""


class ServerRouteConformance(OfferConformance):
    """Subclasses set `offer` and `module`; `state` if the router reads it while it is built."""

    def state(self) -> Any:
        """What stands in for the server's state: nothing is loaded, nobody is connected."""
        return SimpleNamespace(client=None, config=None, model="toy", metrics=None, tokenizer=None, draining=False)

    def router(self) -> Any:
        """The router with the options of the suite."""
        fastapi = pytest.importorskip("fastapi")
        router = self.offer.build(self.options(), state=self.state())
        assert isinstance(router, fastapi.APIRouter)
        return router

    def test_every_route_has_a_path_and_a_method(self) -> None:
        """An empty router is a mistake."""
        routes = self.router().routes
        assert routes
        for route in routes:
            assert route.path.startswith("/")
            assert getattr(route, "methods", {"WEBSOCKET"})

    def test_no_path_is_taken(self) -> None:
        """Neither twice nor by the server."""
        seen = [(route.path, method) for route in self.router().routes for method in getattr(route, "methods", ())]
        assert len(seen) == len(set(seen))
        assert not {path for path, _ in seen} & set(TAKEN)

    def test_it_can_be_mounted_and_described(self) -> None:
        """The schema of an app that holds it alone."""
        app = pytest.importorskip("fastapi").FastAPI()
        app.include_router(self.router())
        schema = app.openapi()
        shown = {route.path for route in self.router().routes if getattr(route, "include_in_schema", False)}
        assert shown <= set(schema["paths"])

    def test_building_twice_gives_two_routers(self) -> None:
        """No state at module level."""
        assert self.router() is not self.router()


__all__ = ["ServerRouteConformance"]
