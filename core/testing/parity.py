"""Law 1, run for real: composition does not change the text.

`Combination` names one way to compute; `ParityBench` runs prompts that way on a real model and reports every prompt
whose greedy tokens differ from the expected ones. In float32 there must be none.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from engine.client import EngineClient
from engine.compose import resolve_source
from engine.config.load import load_config
from engine.llm import LLM
from engine.messages import Add, Output
from engine.registry import Registry
from engine.request import Request, Status
from engine.sampling_params import SamplingParams

PREEMPT_AFTER = 5
"""Output tokens after which a request is preempted, where that is asked for."""


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt and the greedy tokens that must follow."""

    name: str
    prompt: list[int]
    expected: list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What an engine is composed of."""

    cache: str = "radix"
    chunk: int | None = None
    speculator: str = "none"
    pair: str = ""  # the KV connector through which another engine process, which computes the prompts, hands them over
    producer_page: int | None = None  # page size of that engine, where it differs

    def overrides(self, base: Sequence[str]) -> list[str]:
        """`--set` values."""
        chunk = [] if self.chunk is None else [f"scheduler.prefill_chunk={self.chunk}"]
        drafts = [f"speculator.use={self.speculator}", "speculator.controller=false"]  # every step, as long as possible
        return [*base, f"kv_cache.use={self.cache}", *drafts, *chunk]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """How the prompts arrive."""

    warm: bool = False  # every prompt was computed before, so its prefix is cached
    keep: bool = False  # whatever earlier traffic left in the cache stays
    batch: int = 1  # how many at once
    preempt: bool = False


@dataclass(frozen=True, slots=True)
class Outcome:
    """One combination's result."""

    build: Build
    traffic: Traffic
    wrong: list[str]  # names of cases with other tokens
    cached_tokens: int
    preemptions: int
    drafted: int
    fetched: int  # requests whose KV came from the other engine


def every_build() -> Iterator[Build]:
    """{paged, radix} x {chunk 64, unchunked} x {n-gram off, on} x {one process, pair}."""
    for cache, chunk, speculator, pair in product(("paged", "radix"), (None, 64), ("none", "ngram"), ("", "local")):
        yield Build(cache=cache, chunk=chunk, speculator=speculator, pair=pair)


def every_traffic() -> Iterator[Traffic]:
    """{cold, prefix hit} x {alone, 16 at once} x {preempted, not}."""
    for warm, batch, preempt in product((False, True), (1, 16), (False, True)):
        yield Traffic(warm=warm, batch=batch, preempt=preempt)


class ParityBench(AbstractContextManager["ParityBench"]):
    """One engine (two for a pair) that serves traffic of any kind.

    Args:
        base: `--set` values that all builds share, `model.dtype=float32` among them.
    """

    def __init__(self, build: Build, base: Sequence[str] = ("model.dtype=float32",)) -> None:
        self.build = build
        sides = "role: consumer", "role: producer, lease_seconds: 600"
        own, others = ([f"kv_connectors=[{{use: {build.pair}, {side}}}]"] if build.pair else [] for side in sides)
        others += [f"kv_cache.page_size={build.producer_page}"] if build.producer_page else []
        self._producer = Producer([*base, *others]) if build.pair else None
        try:
            self._llm = LLM(None, [*build.overrides(base), *own])
        except BaseException:
            self.close_producer()
            raise
        self._count = 0

    def run(self, traffic: Traffic, cases: Sequence[Case]) -> Outcome:
        """Serve the cases; the caches are emptied first unless the traffic wants them warm."""
        scheduler, drafter = self._llm.engine.scheduler, self._llm.engine.drafter
        if not traffic.keep:
            scheduler.cache.reset()
        if traffic.warm:
            self._serve(cases, Traffic(batch=16))
        before = scheduler.preemptions, drafter.counters.drafted if drafter else 0
        wrong, cached, fetched = self._serve(cases, traffic)
        scheduler.cache.check()
        return Outcome(
            self.build,
            traffic,
            wrong,
            cached,
            scheduler.preemptions - before[0],
            (drafter.counters.drafted if drafter else 0) - before[1],
            fetched,
        )

    def _serve(self, cases: Sequence[Case], traffic: Traffic) -> tuple[list[str], int, int]:
        wrong, cached, fetched = [], 0, 0
        for at in range(0, len(cases), traffic.batch):
            group = cases[at : at + traffic.batch]
            got = self._generate(group, traffic.preempt)
            for case, (tokens, hits, arrived) in zip(group, got, strict=True):
                cached, fetched = cached + hits, fetched + arrived
                if tokens != case.expected:
                    wrong.append(case.name)
        return wrong, cached, fetched

    def _generate(self, cases: Sequence[Case], preempt: bool) -> list[tuple[list[int], int, bool]]:
        engine = self._llm.engine
        names = {}
        for case in cases:
            self._count += 1
            name = f"case-{self._count}"
            params = SamplingParams(temperature=0.0, max_tokens=len(case.expected))
            handle = self._producer.prefill(name, case.prompt) if self._producer else None
            refusal = engine.add(Add(name, case.prompt, params, kv_transfer=handle))
            assert refusal is None, refusal
            names[name] = engine.scheduler.requests[name]
        tokens: dict[str, list[int]] = {name: [] for name in names}
        cached = dict.fromkeys(names, 0)
        to_preempt = set(names) if preempt else set()
        while engine.has_work:
            for output in engine.step():
                assert not output.error, output.error
                tokens[output.request_id] += output.token_ids
                cached[output.request_id] = output.cached_tokens
            self._preempt(names, to_preempt)
        arrived = {name: bool(self._producer) and request.kv_source is None for name, request in names.items()}
        return [(tokens[name], cached[name], arrived[name]) for name in names]

    def _preempt(self, requests: dict[str, Request], left: set[str]) -> None:
        """Preempt each request once, in the middle of its text."""
        for name in list(left):
            request = requests[name]
            if request.status is Status.RUNNING and request.num_output >= PREEMPT_AFTER:
                left.discard(name)
                self._llm.engine.scheduler.preempt(request)

    def reset_producer(self) -> None:
        """Forget the prefixes that the other engine has cached."""
        if self._producer is not None:
            self._producer.control("reset_cache")

    def close_producer(self) -> None:
        """Stop the other engine, if there is one."""
        if self._producer is not None:
            self._producer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._llm.close()
        self.close_producer()


class Producer:
    """An engine in a process of its own that computes prompts and publishes their KV."""

    def __init__(self, overrides: Sequence[str]) -> None:
        config = load_config(None, overrides).config
        files = resolve_source(config, Registry.discover(), lambda share, words: None)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="producer", daemon=True)
        self._thread.start()
        self._client = self._call(EngineClient.spawn(config, Path(files.path)))
        self._call(self._client.wait_ready())

    def prefill(self, name: str, prompt: list[int]) -> dict[str, Any]:
        """Compute a prompt; returns the transfer parameters for the engine that goes on."""
        outputs: list[Output] = self._call(self._collect(name, prompt))
        handle = outputs[-1].kv_transfer
        assert handle is not None, f"the producer published nothing: {outputs[-1]}"
        return handle

    async def _collect(self, name: str, prompt: list[int]) -> list[Output]:
        params = SamplingParams(temperature=0.0, max_tokens=1)
        stream = self._client.generate(prompt, params, request_id=name, kv_transfer={"do_remote_decode": True})
        return [output async for output in stream]

    def stats(self) -> dict[str, Any]:
        """The producer's counters."""
        return self.control("stats")

    def control(self, verb: str) -> dict[str, Any]:
        """What the producer answers to a verb of `engine.control`."""
        found: dict[str, Any] = self._call(self._client.control(verb))
        return found

    def _call(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=600)

    def close(self) -> None:
        """Stop the process and the loop."""
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def run_all(
    builds: Iterable[Build],
    traffics: Sequence[Traffic],
    cases: Sequence[Case],
    base: Sequence[str] = ("model.dtype=float32",),
    told: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Every combination; `told` hears of each as it ends."""
    outcomes = []
    for build in builds:
        with ParityBench(build, base) as bench:
            for traffic in traffics:
                outcomes.append(bench.run(traffic, cases))
                told(outcomes[-1])
    return outcomes


__all__ = ["Build", "Case", "Outcome", "ParityBench", "Producer", "Traffic", "every_build", "every_traffic", "run_all"]
