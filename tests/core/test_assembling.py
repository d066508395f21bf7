"""What assembling says before it composes."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from engine.assemble import assemble
from engine.config.model import EngineConfig
from engine.discovery import Entry
from engine.errors import EngineError
from engine.registry import Registry


def test_what_a_plugin_uses_that_will_end_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    said = "acme 1.0 (entry point acme) uses hook API v0, which ends with engine 0.9; write it for v1"
    old = Entry(name="acme", distribution="acme", version="1.0", api=0, load=lambda: None, warnings=(said,))
    with caplog.at_level(logging.WARNING, "engine"), pytest.raises(EngineError):
        assemble(EngineConfig(), Path("nowhere"), registry=Registry([old]))
    assert said in caplog.messages
