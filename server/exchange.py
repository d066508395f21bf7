"""One HTTP request and its answer, as everything below the door sees it: who asks, under which id, what was run for it.

The exchange travels in a context variable, so that routes, built-in or a plugin's, need not hand it on.
"""

from __future__ import annotations

import re
import time
import uuid
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final

from engine.messages import Timing
from engine.server.keys import ANYONE, Key

_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


@dataclass(slots=True, eq=False)
class Run:
    """One request of the core, which makes one choice. Times are seconds of the monotonic clock."""

    request_id: str
    prompt_tokens: int
    began: float
    max_tokens: int | None = None
    first: float | None = None  # first token
    last: float = 0.0  # latest token
    ended: float | None = None
    tokens: int = 0
    cached_tokens: int = 0
    reason: str = ""
    timing: Timing | None = None  # the core's own account


@dataclass(slots=True, eq=False, kw_only=True)
class Exchange:
    """A request that is being answered."""

    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    method: str = ""
    path: str = ""
    key: Key = ANYONE
    arrived: float = field(default_factory=time.monotonic)
    date: float = field(default_factory=time.time)  # seconds since the epoch
    status: int = 0  # of the answer, once it has begun
    ended: float | None = None
    headers: dict[str, str] = field(default_factory=dict)  # for the answer, until it begins
    runs: list[Run] = field(default_factory=list)
    names: list[str] = field(default_factory=list)  # other ids that clients know it by
    cut: str | None = None  # why somebody other than the client ended it
    span: Any = None  # of OpenTelemetry, when it is traced
    trace: dict[str, str] = field(default_factory=dict)  # what log lines say of the trace


_CURRENT: ContextVar[Exchange] = ContextVar("exchange")


def current() -> Exchange:
    """The exchange in whose service the caller runs; outside of one, a new one of nobody."""
    return _CURRENT.get(None) or Exchange()


def enter(exchange: Exchange) -> None:
    """Make an exchange the current one of this task, which the server starts for each request, and of its children."""
    _CURRENT.set(exchange)


def log_fields() -> dict[str, str]:
    """What a log line that is written in the service of a request says of it."""
    exchange = _CURRENT.get(None)
    return {} if exchange is None else {"request_id": exchange.id, **exchange.trace}


def request_id(given: str | None) -> str:
    """The id that a client chose, if it is a plain word, or a new one."""
    return given if given is not None and _ID.fullmatch(given) else uuid.uuid4().hex


__all__ = ["Exchange", "Run", "current", "enter", "log_fields", "request_id"]
