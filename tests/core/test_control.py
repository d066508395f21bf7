from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine.control import answer

ENGINE: Any = SimpleNamespace(
    stats=lambda: {"steps": 5}, scheduler=SimpleNamespace(cache=SimpleNamespace(reset=lambda: 3))
)


def test_the_verbs() -> None:
    assert answer(ENGINE, "stats", {}) == {"steps": 5}
    assert answer(ENGINE, "reset_cache", {}) == {"pages": 3}
    assert answer(ENGINE, "dance", {}) == {"error": "unknown verb 'dance'"}


def test_the_log_level(request: pytest.FixtureRequest) -> None:
    logger = logging.getLogger("engine")
    request.addfinalizer(lambda before=logger.level: logger.setLevel(before))  # type: ignore[misc]
    assert answer(ENGINE, "log_level", {"level": "debug"}) == {"level": "debug"}
    assert logger.level == logging.DEBUG
