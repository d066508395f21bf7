"""Runs a batch: many requests at once, each answer written when it is there, so that a kill loses little.

Knows neither the engine nor HTTP: `Post` is a function that answers one request.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.server.batch_files import Answers, BatchError, Line, read_lines

_PATIENCE: Final = 600.0
"""Seconds that one request may be told to come back later, before the batch is given up for now."""

_BUSY: Final = (429, 503)


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """What a server answered."""

    status: int
    body: bytes
    retry_after: float = 1.0  # seconds, if the server is busy


Post = Callable[[str, bytes], Awaitable[Reply]]
"""Path and JSON body to the answer; raises BatchError when nobody can answer any more."""


@dataclass(slots=True)
class Tally:
    """How a batch went, by lines."""

    answered: int = 0
    failed: int = 0  # answered with an error
    skipped: int = 0  # had an answer before


@dataclass(slots=True)
class Batch:
    """A batch under way."""

    source: Path
    answers: Answers
    post: Post
    done: set[str]  # ids that have an answer
    told: Callable[[Tally], None] = lambda tally: None  # hears of every line
    tally: Tally = field(default_factory=Tally)

    async def run(self, concurrency: int) -> Tally:
        """Answer what has no answer yet, so many requests at once.

        Raises:
            BatchError: nobody answers any more; run it again to go on.
        """
        lines = self._open_lines()
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work(lines))
        except* BatchError as errors:
            raise BatchError(str(errors.exceptions[0])) from None
        return self.tally

    def _open_lines(self) -> Iterator[Line]:
        for _, line in read_lines(self.source):
            if line.custom_id in self.done:
                self.tally.skipped += 1
                self.told(self.tally)
            else:
                yield line

    async def _work(self, lines: Iterable[Line]) -> None:
        for line in lines:  # one iterator for all workers
            fault = _fault(line)
            if fault is not None:
                answer = {"response": None, "error": {"code": "invalid_request", "message": fault}}
            else:
                reply = await self._ask(line)
                response = {"status_code": reply.status, "request_id": uuid.uuid4().hex, "body": _body(reply)}
                answer = {"response": response, "error": None}
            self.answers.add({"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, **answer})
            if fault is None and reply.status == 200:
                self.tally.answered += 1
            else:
                self.tally.failed += 1
            self.told(self.tally)

    async def _ask(self, line: Line) -> Reply:
        body, waited = msgspec.json.encode(line.body), 0.0
        while (reply := await self.post(line.url, body)).status in _BUSY:
            if waited >= _PATIENCE:
                raise BatchError(f"the server has been busy for {waited:.0f} s; run this again to go on")
            waited += max(reply.retry_after, 0.1)
            await asyncio.sleep(max(reply.retry_after, 0.1))
        return reply


def _fault(line: Line) -> str | None:
    """Why a request can't be sent at all."""
    if line.method != "POST":
        return f"method must be POST, not {line.method!r}"
    if not line.url.startswith("/v1/"):
        return f"url must be a path such as /v1/chat/completions, not {line.url!r}"
    if line.body is None:
        return "body is missing"
    if line.body.get("stream"):
        return "stream is not possible in a batch; leave it out"
    return None


def _body(reply: Reply) -> Any:
    """JSON as it came; anything else as text."""
    try:
        msgspec.json.decode(reply.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return reply.body.decode(errors="replace")
    return msgspec.Raw(reply.body)


__all__ = ["Batch", "Post", "Reply", "Tally"]
