"""What each part of the engine did when: spans of time in lanes, for Chrome's trace viewer and for sums.

A tracer is off until it is started; a span then costs one call that returns the same idle object each time. Lanes are
filled by one thread each, so the spans of a lane follow one another or lie within one another. Times are seconds of the
monotonic clock, which processes of one machine share.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any, Final, NamedTuple, Protocol

MOST_SPANS: Final = 200_000
"""Spans that are kept; the oldest make room."""

_IDLE: Final = nullcontext()


class Span(NamedTuple):
    """A stretch of time."""

    lane: str
    name: str
    began: float
    ended: float
    step: int  # 0 where it belongs to none


class Stamps(Protocol):
    """A clock whose readings may come later."""

    def start(self) -> None:
        """Called before the first reading."""

    def stamp(self) -> Any:
        """A moment."""

    def seconds(self, stamp: Any) -> float:
        """That moment on the monotonic clock; waits for it if need be."""


class HostStamps:
    """The monotonic clock itself."""

    def start(self) -> None:
        """Nothing to prepare."""

    def stamp(self) -> float:
        """Now."""
        return time.monotonic()

    def seconds(self, stamp: float) -> float:
        """The stamp."""
        return stamp


class Tracer:
    """Spans of one process.

    Args:
        device: the clock of the lane `device`, where work is not done yet when the call returns.
    """

    def __init__(self, device: Stamps | None = None) -> None:
        self._host, self._device = HostStamps(), device or HostStamps()
        self._spans: deque[tuple[str, str, Any, Any, int]] = deque(maxlen=MOST_SPANS)
        self.span: Callable[[str, str, int], AbstractContextManager[None]] = _no_span

    def start(self) -> None:
        """Record from now on; what was recorded before is forgotten."""
        self._spans.clear()
        self._device.start()
        self.span = self._record

    def stop(self) -> list[Span]:
        """Record no more; what was recorded, in the order in which it ended. Empty if it was not started."""
        self.span = _no_span
        spans, self._spans = self._spans, deque(maxlen=MOST_SPANS)
        return [
            Span(lane, name, clock.seconds(began), clock.seconds(ended), step)
            for lane, name, began, ended, step in spans
            for clock in [self._clock(lane)]
        ]

    def _record(self, lane: str, name: str, step: int) -> AbstractContextManager[None]:
        return _Recording(self._spans, self._clock(lane), lane, name, step)

    def _clock(self, lane: str) -> Stamps:
        return self._device if lane == "device" else self._host


class _Recording:
    """One span while it lasts."""

    __slots__ = ("_began", "_clock", "_lane", "_name", "_spans", "_step")

    def __init__(self, spans: deque[tuple[str, str, Any, Any, int]], clock: Stamps, lane: str, name: str, step: int):
        self._spans, self._clock, self._lane, self._name, self._step = spans, clock, lane, name, step

    def __enter__(self) -> None:
        self._began = self._clock.stamp()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spans.append((self._lane, self._name, self._began, self._clock.stamp(), self._step))


def _no_span(lane: str, name: str, step: int) -> AbstractContextManager[None]:
    return _IDLE


def chrome_trace(processes: Mapping[str, Iterable[Span]]) -> dict[str, Any]:
    """The spans of each process as a file for chrome://tracing and Perfetto (Trace Event Format: complete events with
    times in microseconds, and names of processes and threads as metadata). The first span begins at 0."""
    found = {name: list(spans) for name, spans in processes.items()}
    zero = min((span.began for spans in found.values() for span in spans), default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (process, spans) in enumerate(found.items(), 1):
        events.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}})
        lanes = {lane: tid for tid, lane in enumerate(dict.fromkeys(span.lane for span in spans), 1)}
        for lane, tid in lanes.items():
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": lane}})
        events += [
            {
                "ph": "X",
                "name": span.name,
                "pid": pid,
                "tid": lanes[span.lane],
                "ts": (span.began - zero) * 1e6,
                "dur": (span.ended - span.began) * 1e6,
                "args": {"step": span.step} if span.step else {},
            }
            for span in spans
        ]
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def busy(spans: Sequence[Span], name: str = "step") -> tuple[float, int] | None:
    """Which share of the time between the first and the last step the device was at work, and how many steps those
    were; None of fewer than two."""
    steps = [span for span in spans if span.lane == "device" and span.name == name]
    if len(steps) < 2:
        return None
    whole = max(span.ended for span in steps) - min(span.began for span in steps)
    return sum(span.ended - span.began for span in steps) / whole, len(steps)


__all__ = ["MOST_SPANS", "HostStamps", "Span", "Stamps", "Tracer", "busy", "chrome_trace"]
