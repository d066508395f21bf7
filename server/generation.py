"""Running the choices of one request in the core and merging what they say."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from engine.errors import EngineError
from engine.messages import FinishReason, Output
from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError, bad_request
from engine.server.exchange import Exchange, Run, current
from engine.server.limits import charge, charge_output, check_concurrency
from engine.server.state import ServerState
from engine.text import ChoiceText, Delta


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request of the core: it makes one choice."""

    index: int  # of the choice
    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    kv_transfer: dict[str, Any] | None = None


async def generate(state: ServerState, jobs: Sequence[tuple[Job, ChoiceText]]) -> AsyncGenerator[Delta]:
    """The deltas of all choices as they come; each choice ends with the delta that has a finish reason.

    Closing the iterator, or an error of one choice, aborts all.

    Raises:
        ApiError: 400 when the engine finds fault with the request, 429 when its queue is full, 500 when it failed on
            the request, 503 when it stops.
    """
    exchange = current()
    check_concurrency(exchange, state.active.values(), state.pace.wait(1, time.monotonic()))
    charge(state.limiter, exchange, (job.prompt for job, _ in jobs))
    state.journal.begin(exchange)
    streams = [_choice(state, exchange, job, text) for job, text in jobs]
    merged = streams[0] if len(streams) == 1 else _merge(streams)
    async with aclosing(merged):
        async for delta in merged:
            yield delta


async def _choice(state: ServerState, exchange: Exchange, job: Job, text: ChoiceText) -> AsyncGenerator[Delta]:
    run = Run(job.request_id, len(job.prompt), time.monotonic(), job.params.max_tokens)
    exchange.runs.append(run)
    watch = state.metrics.begin(run)
    outputs = state.client.generate(
        job.prompt,
        job.params,
        request_id=job.request_id,
        priority=job.priority,
        cache_salt=exchange.key.salted(job.cache_salt),
        kv_transfer=job.kv_transfer,
        tenant=exchange.key.name,
        weight=exchange.key.weight,
    )
    reason = "abort"
    try:
        async with aclosing(outputs):
            async for output in outputs:
                _raise_failure(output, state)
                with state.tracer.span("http", "detokenize", 0):
                    delta = text.feed(output)
                _measure(state, job, run, output)
                watch.output(len(delta.token_ids), delta.cached_tokens, output.timing)
                charge_output(state.limiter, exchange, len(delta.token_ids))
                reason = delta.finish_reason or reason
                yield delta
                reason = delta.finish_reason or reason  # who reads the answer may end it
                if delta.finish_reason is not None:
                    return
    except ApiError as error:
        reason = "refused" if error.status == 429 else "error"
        raise
    except EngineError as error:
        reason = "error"
        raise ApiError(503, str(error)) from error
    finally:
        watch.end(reason)
        if reason in ("stop", "length"):
            state.pace.finished(time.monotonic())


def _measure(state: ServerState, job: Job, run: Run, output: Output) -> None:
    """Learn from the first tokens how long prompts take here; fetched ones are measured in the core."""
    fetched = (job.kv_transfer or {}).get("do_remote_prefill")
    if run.first is None and output.token_ids and output.timing is not None and not fetched:
        state.prefills.add(run.prompt_tokens - output.cached_tokens, output.timing.prefill, time.monotonic())


def _raise_failure(output: Output, state: ServerState) -> None:
    dead = state.client.failed
    if output.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
        return
    if dead is not None or output.finish_reason is FinishReason.ABORT:
        raise ApiError(503, dead or "the engine gave up this request while stopping")
    if output.refused:
        seconds = state.pace.wait(max(1, state.client.waiting // 2), time.monotonic())  # half the queue is gone then
        raise ApiError(429, output.error, code="queue_full", retry_after=seconds)
    if output.invalid:
        raise bad_request(output.error)
    raise ApiError(500, output.error)


async def _merge(streams: Sequence[AsyncGenerator[Delta]]) -> AsyncGenerator[Delta]:
    """Interleave the streams in the order of arrival; the first error ends all."""
    queue: asyncio.Queue[Delta | ApiError | None] = asyncio.Queue()

    async def pump(stream: AsyncIterator[Delta]) -> None:
        try:
            async for delta in stream:
                queue.put_nowait(delta)
        except ApiError as error:
            queue.put_nowait(error)
        finally:
            queue.put_nowait(None)

    tasks = [asyncio.create_task(pump(stream)) for stream in streams]
    try:
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, ApiError):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


__all__ = ["Job", "generate"]
