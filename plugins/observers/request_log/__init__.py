"""Writes one line of JSON for each finished request: what it took and how long; never what was said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Offer, Options

if TYPE_CHECKING:
    from engine.specs.observer import Observer


class RequestLogOptions(Options):
    """Where the lines go."""

    path: str | None = Field(None, description="File that lines are appended to; stderr if unset.")


def build(options: RequestLogOptions) -> Observer:
    """Open the file.

    Raises:
        ResourceError: it can't be written.
    """
    from engine.plugins.observers.request_log.observer import RequestLog

    return RequestLog(options.path)


@hookimpl
def observers() -> list[Offer[Observer]]:
    """The request log."""
    return [
        Offer(
            name="request_log",
            summary="One JSON line per finished request: tokens, durations, reason; no text.",
            build=build,
            options=RequestLogOptions,
        )
    ]
