"""An engine as the router sees it, and the choice among several."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from engine.server.router.prefixes import Seen


class Standing(StrEnum):
    """What the last probe, or the last request, said of an engine."""

    UNKNOWN = "unknown"  # not probed yet
    READY = "ready"
    UNREADY = "unready"  # lives, but loads or drains
    DEAD = "dead"


@dataclass(slots=True, eq=False, kw_only=True)
class Worker:
    """One engine. Belongs to the event loop's thread."""

    url: str
    role: Literal["prefill", "decode"]
    seen: Seen
    standing: Standing = Standing.UNKNOWN
    drained: bool = False  # an operator wants no new requests there
    active: int = 0  # requests of this router under way there
    owed: float = 0.0  # seconds of prompts under way there, as estimated
    failures: int = 0  # probes in a row without an answer
    chosen: int = 0  # when, as a running number
    load: dict[str, Any] = field(default_factory=dict)  # what /load said last
    waits: set[asyncio.Timeout] = field(default_factory=set)  # of requests that wait for it

    @property
    def usable(self) -> bool:
        """Whether new requests may go there."""
        return self.standing is Standing.READY and not self.drained

    @property
    def pressure(self) -> int:
        """Requests there, other routers' too."""
        return max(self.active, sum(n for n in map(self.load.get, ("running", "waiting")) if isinstance(n, int)))

    def die(self) -> None:
        """It doesn't answer: whoever waits for it hears at once, and its cache will be empty."""
        self.standing, self.load = Standing.DEAD, {}
        self.seen.clear()
        now = asyncio.get_running_loop().time()
        for wait in self.waits:
            wait.reschedule(now)

    @contextmanager
    def busy(self, seconds: float = 0.0) -> Iterator[None]:
        """While a request is under way there whose prompt takes an estimated `seconds`."""
        self.active += 1
        self.owed += seconds
        try:
            yield
        finally:
            self.active -= 1
            self.owed = max(0.0, self.owed - seconds) if self.active else 0.0

    def row(self) -> dict[str, Any]:
        """For people; JSON values only."""
        return {
            "url": self.url,
            "role": self.role,
            "standing": str(self.standing),
            "drained": self.drained,
            "active": self.active,
            "running": self.load.get("running"),
            "waiting": self.load.get("waiting"),
            "prefill": self.load.get("prefill"),
            "fetch": self.load.get("fetch"),
        }


class Chooser:
    """Takes the engine that has most of the prompt cached among those that are not much busier than the least busy."""

    def __init__(self, slack: int) -> None:
        self._slack, self._number = slack, 0

    def choose(self, workers: Iterable[Worker], blocks: Sequence[bytes]) -> Worker | None:
        """The best of the workers; among equals the one that was chosen longest ago. None if there are none."""
        able = list(workers)
        if not able:
            return None
        most = min(worker.pressure for worker in able) + self._slack
        near = [worker for worker in able if worker.pressure <= most]
        best = max(near, key=lambda worker: (worker.seen.matched(blocks), -worker.pressure, -worker.chosen))
        self._number += 1
        best.chosen = self._number
        return best


__all__ = ["Chooser", "Standing", "Worker"]
