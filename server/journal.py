"""The requests that finished lately, and what the time of each was made of."""

from __future__ import annotations

import logging
from collections import deque
from datetime import UTC, datetime
from typing import Any, Final

from engine.messages import Timing
from engine.server.exchange import Exchange, Run

log = logging.getLogger(__name__)

_QUIET: Final = ("/health", "/metrics", "/load")
"""Paths that probes ask for all the time; they are not logged."""


class Journal:
    """Keeps the last exchanges that the core worked for, those under way included.

    Args:
        kept: how many.
        lines: write a log line for each HTTP request.
    """

    def __init__(self, kept: int, lines: bool) -> None:
        self._kept: deque[Exchange] = deque(maxlen=kept)
        self._lines = lines

    def begin(self, exchange: Exchange) -> None:
        """The core begins to work for an exchange."""
        self._kept.append(exchange)

    def close(self, exchange: Exchange) -> None:
        """The HTTP side of an exchange has ended."""
        if self._lines and not exchange.path.startswith(_QUIET):
            log.info(
                "%s %r %d in %.3f s, %d + %d tokens, %s",
                *(exchange.method, exchange.path, exchange.status, _total(exchange)),
                *(
                    sum(run.prompt_tokens for run in exchange.runs),
                    sum(run.tokens for run in exchange.runs),
                    exchange.id,
                ),
                extra={"fields": _line(exchange)},
            )

    def find(self, wanted: str) -> Exchange | None:
        """The latest exchange of this id: of the request, of its answer (`chatcmpl-ID`), or of one of its choices."""
        return next((one for one in reversed(self._kept) if goes_by(one, wanted)), None)


def under_way(exchange: Exchange) -> bool:
    """Whether something is still missing: a choice, perhaps one in the background, or the end of the answer."""
    return exchange.ended is None or any(run.ended is None for run in exchange.runs)


def goes_by(exchange: Exchange, wanted: str) -> bool:
    """Whether an id means this exchange."""
    answer = wanted.removeprefix("chatcmpl-").removeprefix("cmpl-").removeprefix("msg_")
    named = wanted in exchange.names or wanted in [run.request_id for run in exchange.runs]
    return named or exchange.id in (wanted, answer)


def account(exchange: Exchange) -> dict[str, Any]:
    """What the time of an exchange was made of; seconds. The parts add up to the total, for its slowest choice."""
    run = max(exchange.runs, key=lambda run: run.ended or 0.0)
    return {
        "request_id": exchange.id,
        "key": exchange.key.name,
        "path": exchange.path,
        "status": exchange.status,
        "started": datetime.fromtimestamp(exchange.date, UTC).isoformat(timespec="milliseconds"),
        "total_seconds": round(_total(exchange), 6),
        "first_token_seconds": None if run.first is None else round(run.first - exchange.arrived, 6),
        "prompt_tokens": run.prompt_tokens,
        "cached_tokens": run.cached_tokens,
        "output_tokens": run.tokens,
        "choices": [{"id": r.request_id, "output_tokens": r.tokens, "reason": r.reason} for r in exchange.runs],
        "parts": [
            {"part": part, "seconds": round(seconds, 6), "about": about}
            for part, seconds, about in _parts(exchange, run)
        ],
    }


def _parts(exchange: Exchange, run: Run) -> list[tuple[str, float, str]]:
    before = run.began - exchange.arrived
    if (timing := run.timing) is None:
        within = (run.ended or run.began) - run.began
        engine = [("engine", within, "it ended before the engine could give an account")]
    else:
        engine = _engine_parts(timing, run)
    after = _total(exchange) - before - sum(seconds for _, seconds, _ in engine)
    return [
        ("prepare", before, "receiving, chat template, tokenizing, rate limit"),
        *engine,
        ("deliver", max(0.0, after), "detokenizing, HTTP, and the client's own reading"),
    ]


def _engine_parts(timing: Timing, run: Run) -> list[tuple[str, float, str]]:
    own = timing.decode - timing.stalled - timing.preempted
    computed = run.prompt_tokens - run.cached_tokens
    return [
        ("queue", timing.queue, "waiting for a place, pages and its turn"),
        ("prefill", timing.prefill + min(0.0, own), f"{computed} prompt tokens computed, {run.cached_tokens} cached"),
        ("decode", max(0.0, own), f"{run.tokens} tokens in {timing.steps} steps after the first token's"),
        ("stalled", timing.stalled, "its steps took longer, since prompts of others were computed in them"),
        ("preempted", timing.preempted, f"waiting for pages after {timing.preemptions} preemptions"),
    ]


def _total(exchange: Exchange) -> float:
    """Seconds from the request to the end of the answer, or of what it left to be done in the background."""
    ends = [exchange.ended, *(run.ended for run in exchange.runs)]
    return max((end for end in ends if end is not None), default=exchange.arrived) - exchange.arrived


def _line(exchange: Exchange) -> dict[str, Any]:
    """The fields of a log line: never a word of the prompt or of the answer."""
    return {
        "request_id": exchange.id,
        "key": exchange.key.name,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "seconds": round(_total(exchange), 6),
        "choices": len(exchange.runs),
        "prompt_tokens": sum(run.prompt_tokens for run in exchange.runs),
        "cached_tokens": sum(run.cached_tokens for run in exchange.runs),
        "output_tokens": sum(run.tokens for run in exchange.runs),
        **exchange.trace,
    }


__all__ = ["Journal", "account", "goes_by", "under_way"]
