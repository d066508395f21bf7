"""Responses that are computed though nobody waits for them; their clients fetch them later, or cancel them."""

from __future__ import annotations

import asyncio
import logging

from engine.server.errors import ApiError
from engine.server.exchange import current
from engine.server.responses_api.reply import ResponseReply
from engine.server.state import ServerState

log = logging.getLogger(__name__)


class Background:
    """The responses under way. A server that drains waits for them as for any other answer."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(self, reply: ResponseReply) -> None:
        """Compute a response on a task of its own."""
        task = asyncio.create_task(self._run(reply), name=reply.id)
        self._tasks[reply.id] = task
        self._state.active[task] = current()

        def end(done: asyncio.Task[None]) -> None:
            del self._tasks[reply.id]
            self._state.active.pop(done, None)

        task.add_done_callback(end)

    async def cancel(self, name: str) -> bool:
        """End a response; False if it isn't under way. When this returns, its state says so."""
        task = self._tasks.get(name)
        if task is None:
            return False
        task.cancel()
        await asyncio.wait({task})
        return True

    async def _run(self, reply: ResponseReply) -> None:
        try:
            await reply.finish()
        except ApiError as error:
            reply.fail(error)
        except asyncio.CancelledError:
            reply.cancel()
            raise
        except Exception:
            log.exception("the response %s broke off", reply.id)
            reply.fail(ApiError(500, "the server failed on this request"))


__all__ = ["Background"]
