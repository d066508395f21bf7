"""Follows each request from station to station and writes its line at the end. Called on the observers' thread."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from engine.errors import ResourceError
from engine.specs.observer import Observer, RequestEvent, Stage

MOST_OPEN: Final = 100_000
"""Requests followed at once. When the ends of requests were dropped, the oldest make room."""


@dataclass(slots=True)
class Life:
    """Times, on the monotonic clock, at which a request reached its stations; None for those it hasn't."""

    queued: float | None = None
    admitted: float | None = None
    first_token: float | None = None
    preemptions: int = 0


class RequestLog(Observer):
    """One line per finished request."""

    def __init__(self, path: str | None) -> None:
        try:
            self._file = sys.stderr if path is None else open(path, "a", encoding="utf-8")  # noqa: SIM115
        except OSError as error:
            raise ResourceError(
                f"the request log can't write to {path!r}: {error.strerror}; name another file in `path`"
            ) from error
        self._owned = path is not None
        self._lives: dict[str, Life] = {}
        self._epoch = time.time() - time.monotonic()  # turns event times into dates

    def receive(self, events: Sequence[RequestEvent]) -> None:
        """Write the lines of those that finished, in one go."""
        lines = [json.dumps(record) + "\n" for event in events if (record := self._follow(event))]
        if lines:
            self._file.write("".join(lines))
            self._file.flush()

    def close(self) -> None:
        """Close the file, if it is one."""
        if self._owned:
            self._file.close()

    def _follow(self, event: RequestEvent) -> dict[str, Any] | None:
        """Take in one event; the record of the request if it is the last."""
        if event.stage is Stage.FINISHED:
            return self._record(event, self._lives.pop(event.request_id, Life()))
        if event.stage is Stage.QUEUED:
            self._lives[event.request_id] = Life(queued=event.time)
            if len(self._lives) > MOST_OPEN:
                del self._lives[next(iter(self._lives))]
        elif life := self._lives.get(event.request_id):
            if event.stage is Stage.ADMITTED:
                life.admitted = event.time
            elif event.stage is Stage.FIRST_TOKEN:
                life.first_token = event.time
            elif event.stage is Stage.PREEMPTED:
                life.preemptions += 1
        return None

    def _record(self, event: RequestEvent, life: Life) -> dict[str, Any]:
        return {
            "finished": datetime.fromtimestamp(event.time + self._epoch, UTC).isoformat(timespec="milliseconds"),
            "request": event.request_id,
            "reason": event.reason,
            "prompt_tokens": event.prompt_tokens,
            "cached_tokens": event.cached_tokens,
            "output_tokens": event.output_tokens,
            "preemptions": life.preemptions,
            "queue_seconds": _between(life.queued, event.time if life.admitted is None else life.admitted),
            "prefill_seconds": _between(life.admitted, event.time if life.first_token is None else life.first_token),
            "decode_seconds": _between(life.first_token, event.time),
        }


def _between(start: float | None, end: float) -> float | None:
    """Seconds, to the microsecond; None for a stretch that was never begun."""
    return None if start is None else round(end - start, 6)


__all__ = ["RequestLog"]
