"""Looks at every engine again and again: whether it takes requests, and how busy it is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import httpx
import msgspec

from engine.server.router.config import ProbeSection
from engine.server.router.worker import Standing, Worker

log = logging.getLogger(__name__)


class Prober:
    """One task per engine.

    Args:
        http: belongs to the caller.
    """

    def __init__(self, http: httpx.AsyncClient, section: ProbeSection) -> None:
        self._http, self._section = http, section
        self._headers = {} if section.key is None else {"Authorization": f"Bearer {section.key.get_secret_value()}"}

    async def watch(self, workers: Sequence[Worker]) -> None:
        """Probe until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for worker in workers:
                tasks.create_task(self._follow(worker))

    async def _follow(self, worker: Worker) -> None:
        while True:
            before = worker.standing
            await self.probe(worker)
            if worker.standing is not before:
                log.info("the %s engine at %s is %s", worker.role, worker.url, worker.standing)
            await asyncio.sleep(self._section.seconds)

    async def probe(self, worker: Worker) -> None:
        """One look."""
        try:
            status = (await self._get(worker, "/health/ready")).status_code
            if status == 404:  # another server's engine
                status = (await self._get(worker, "/health")).status_code
        except httpx.HTTPError as error:
            worker.failures += 1
            hopeless = isinstance(error, httpx.ConnectError) or worker.failures >= self._section.failures
            if hopeless and worker.standing is not Standing.DEAD:
                worker.die()
            return
        worker.failures = 0
        worker.standing = Standing.READY if status == 200 else Standing.UNREADY
        worker.load = await self._load(worker)

    async def _load(self, worker: Worker) -> dict[str, object]:
        """What /load says; nothing if it says nothing, which is no reason to avoid an engine."""
        try:
            response = await self._get(worker, "/load")
            found = msgspec.json.decode(response.content) if response.status_code == 200 else {}
        except (httpx.HTTPError, msgspec.DecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _get(self, worker: Worker, path: str) -> httpx.Response:
        return await self._http.get(worker.url + path, headers=self._headers, timeout=self._section.timeout)


__all__ = ["Prober"]
