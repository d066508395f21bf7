"""The way of one request: prefill engine or not, decode engine, and again elsewhere when one of them fails."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Collection, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from engine.server.errors import ApiError
from engine.server.router.bodies import (
    decode_body,
    divisible,
    generates,
    prefill_body,
    prompt_tokens,
    steers_itself,
)
from engine.server.router.config import PrefixSection, RetrySection
from engine.server.router.metrics import RouterMetrics
from engine.server.router.planner import Planner, Prompt
from engine.server.router.prefixes import chain, prompt_text
from engine.server.router.upstream import Asked, Reply, Upstream, WorkerLost
from engine.server.router.worker import Chooser, Standing, Worker

log = logging.getLogger(__name__)

_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")

_ELSEWHERE: Final = frozenset({429, 500, 502, 503, 504})
"""Answers that another engine may not give."""

_FINAL: Final = frozenset({429, 500})
"""Those of them that waiting for an engine to come up would not change."""

_TICK: Final = 0.02
"""Seconds between looks for an engine that has come up."""


_RELEASE: Final = "/v1/kv_transfer/release"

_RELEASE_SECONDS: Final = 5.0
"""A release is a courtesy: the lease ends the publication, too."""


class Published(NamedTuple):
    """KV that waits at a prefill engine."""

    worker: Worker
    params: dict[str, Any]


class Dispatcher:
    """Finds engines for requests."""

    def __init__(
        self,
        workers: Sequence[Worker],
        upstream: Upstream,
        planner: Planner,
        metrics: RouterMetrics,
        prefix: PrefixSection,
        retry: RetrySection,
    ) -> None:
        self._workers, self._upstream, self._planner, self._metrics = workers, upstream, planner, metrics
        self._prefix, self._retry = prefix, retry
        self._chooser = Chooser(prefix.slack)
        self._releases: set[asyncio.Task[None]] = set()

    def usable(self, role: str) -> list[Worker]:
        """Engines of a pool that take requests."""
        return [worker for worker in self._workers if worker.role == role and worker.usable]

    async def generate(self, asked: Asked) -> Reply:
        """The answer to a request that has the model write.

        Raises:
            ApiError: 503 when no engine lives.
        """
        pool = steers_itself(asked.body)
        text = prompt_text(asked.body)
        owner = asked.headers.get("authorization", asked.headers.get("x-api-key", "")).encode("latin-1")
        prompt = Prompt(size=len(text), blocks=chain(text, self._prefix.block, owner))
        fixed = await self._owner_of_previous(asked)
        failed: set[Worker] = set()
        last: Reply | None = None
        for _ in range(self._retry.attempts):
            worker = fixed or await self._find(
                pool or "decode", prompt, failed, final=last is not None and last.status in _FINAL
            )
            if worker is None:
                break
            try:
                last = await self._attempt(asked, prompt, worker, alone=pool is not None)
            except WorkerLost as error:
                self._failed(asked, worker, str(error), failed)
                continue
            if last.status not in _ELSEWHERE:
                return last
            if last.status == 503:
                worker.standing = Standing.UNREADY  # until a probe says otherwise
            self._failed(asked, worker, f"{worker.url} answered {last.status}", failed)
        if last is not None:
            return last
        raise ApiError(503, "no engine of this router takes requests at the moment; try again soon", retry_after=1)

    async def anywhere(self, asked: Asked, *, search: bool) -> Reply:
        """An answer that any engine has; with `search`, of the one that knows what others answer 404 to.

        Raises:
            ApiError: 503 when no engine answers.
        """
        last: Reply | None = None
        await self._find("decode", Prompt(size=0, blocks=()), set(), final=False)
        for worker in [*self.usable("decode"), *self.usable("prefill")]:
            try:
                last = await self._upstream.send(worker, asked)
            except WorkerLost as error:
                self._failed(asked, worker, str(error), set())
                continue
            if last.status not in _ELSEWHERE and not (search and last.status == 404):
                return last
        if last is not None:
            return last
        raise ApiError(503, "no engine of this router answers at the moment; try again soon", retry_after=1)

    async def _attempt(self, asked: Asked, prompt: Prompt, worker: Worker, *, alone: bool) -> Reply:
        published = None
        if not alone and worker.role == "decode" and generates(asked.path) and divisible(asked.body):
            published = await self._prefilled(asked, prompt, worker)
        worker.seen.add(prompt.blocks)
        if published is None:
            return await self._upstream.send(worker, asked, seconds=self._planner.seconds(worker, prompt))
        try:
            reply = await self._upstream.send(worker, asked, decode_body(asked.raw, asked.body, published.params))
        except BaseException:  # the client left, or the engine is gone: nobody may have come for the KV
            self._release(asked, published)
            raise
        if reply.status in _ELSEWHERE:
            self._release(asked, published)
        return reply

    def _release(self, asked: Asked, published: Published) -> None:
        """Tell a prefill engine, beside everything else, that its KV isn't wanted; no news if it was fetched."""
        task = asyncio.get_running_loop().create_task(self._tell_release(asked, published))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _tell_release(self, asked: Asked, published: Published) -> None:
        body = msgspec.json.encode({"kv_transfer_params": published.params})
        headers = {**_plain(asked), "content-type": "application/json"}
        ask = Asked(method="POST", target=_RELEASE, path=_RELEASE, headers=headers, raw=body, id=asked.id)
        try:
            async with asyncio.timeout(_RELEASE_SECONDS):
                await self._upstream.send(published.worker, ask)
        except (WorkerLost, TimeoutError) as error:
            log.debug("the KV of request %s stays until its lease expires: %s", asked.id, error)

    async def _prefilled(self, asked: Asked, prompt: Prompt, decode: Worker) -> Published | None:
        """What a prefill engine returned for the decode engine; None if that one computes the prompt itself."""
        failed: set[Worker] = set()
        while True:
            able = [worker for worker in self.usable("prefill") if worker not in failed]
            worker = self._chooser.choose(able, prompt.blocks)
            if not self._planner.remote(asked.id, prompt, worker, decode) or worker is None:
                return None
            try:
                seconds = self._planner.seconds(worker, prompt)
                worker.seen.add(prompt.blocks)
                reply = await self._upstream.send(worker, asked, prefill_body(asked.path, asked.body), seconds)
            except ValueError as error:
                log.debug("request %s can't be handed over: %s", asked.id, error)
                return None
            except WorkerLost as error:
                self._failed(asked, worker, str(error), failed)
                continue
            if reply.status == 200:
                params = self._params(prompt, reply)
                return None if params is None else Published(worker, params)
            if reply.status not in _ELSEWHERE:
                return None  # the client's mistake; the decode engine will tell it
            self._failed(asked, worker, f"{worker.url} answered {reply.status}", failed)

    def _params(self, prompt: Prompt, reply: Reply) -> dict[str, Any] | None:
        try:
            answer = msgspec.json.decode(reply.body)
        except msgspec.DecodeError:
            return None
        if not isinstance(answer, dict):
            return None
        self._planner.learn(prompt, prompt_tokens(answer))
        params = answer.get("kv_transfer_params")
        return params if isinstance(params, dict) else None

    async def _find(self, pool: str, prompt: Prompt, failed: Collection[Worker], *, final: bool) -> Worker | None:
        """The best engine for a prompt; waits for one to come up, unless there is an answer to fall back on.

        The other pool helps out: every engine can do everything.
        """
        loop = asyncio.get_running_loop()
        end = loop.time() + self._retry.wait_seconds
        while True:
            for role in (pool, "decode" if pool == "prefill" else "prefill"):
                able = [worker for worker in self.usable(role) if worker not in failed]
                if (found := self._chooser.choose(able, prompt.blocks)) is not None:
                    return found
            if final or loop.time() >= end:
                return None
            await asyncio.sleep(_TICK)
            failed = ()  # who has failed may have come back

    async def _owner_of_previous(self, asked: Asked) -> Worker | None:
        """The engine that keeps the response which this request goes on from."""
        previous = asked.body.get("previous_response_id")
        if not isinstance(previous, str) or not _NAME.fullmatch(previous):
            return None
        target = f"/v1/responses/{previous}"
        ask = Asked(method="GET", target=target, path=target, headers=_plain(asked), raw=b"", id=asked.id)
        for worker in self.usable("decode"):
            try:
                if (await self._upstream.send(worker, ask)).status == 200:
                    return worker
            except WorkerLost as error:
                self._failed(asked, worker, str(error), set())
        return None

    def _failed(self, asked: Asked, worker: Worker, why: str, failed: set[Worker]) -> None:
        log.warning("request %s goes elsewhere: %s", asked.id, why)
        failed.add(worker)
        self._metrics.retried(worker)


def _plain(asked: Asked) -> dict[str, str]:
    """The headers without those of a body."""
    return {name: value for name, value in asked.headers.items() if name not in ("content-type", "content-encoding")}


__all__ = ["Dispatcher"]
