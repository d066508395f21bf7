"""Load on an endpoint: many streamed completions, and what their clients saw.

TTFT: from sending a request to its first text. ITL: each gap between two pieces of text. TPOT: (end - first text) /
(output tokens - 1). E2E: from sending to the end. All in seconds.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from engine.server.cli.endpoint import Endpoint, EndpointError

_WORDS: Final = (
    "the of and to in is that it was for on are as with his they at be this from have or by one had not but what all "
    "were when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over "
    "did down only way find use may water long little very after words called just where most know"
)
"""Words that are one token (with the space before it) in nearly every vocabulary of English."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is asked of the server."""

    requests: int
    prompt_tokens: int  # as words; what the server counts is in the report
    max_tokens: int
    shared_prefix: float  # share of the prompt, 0 to 1, that all requests have in common
    concurrency: int  # most requests at once
    rate: float | None  # requests per second, arriving at random; None: as soon as there is room
    ignore_eos: bool
    chat: bool
    seed: int

    def prompts(self) -> Iterator[str]:
        """The same for the same seed."""
        words = _WORDS.split()
        shared = round(self.prompt_tokens * self.shared_prefix)
        common = random.Random(f"{self.seed}").choices(words, k=shared)
        for i in range(self.requests):
            own = random.Random(f"{self.seed}:{i}").choices(words, k=self.prompt_tokens - shared)
            yield " ".join([*common, *own])

    def arrivals(self) -> Iterator[float]:
        """Seconds after the start at which each request may be sent: a Poisson process."""
        rng, now = random.Random(self.seed), 0.0
        for _ in range(self.requests):
            yield now
            now += rng.expovariate(self.rate) if self.rate is not None else 0.0


@dataclass(slots=True)
class Sample:
    """One request as its client saw it; times are of time.perf_counter."""

    start: float
    pieces: list[float] = field(default_factory=list)  # when text arrived
    end: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    error: str = ""

    @property
    def ttft(self) -> float:
        """Seconds to the first text."""
        return self.pieces[0] - self.start

    @property
    def gaps(self) -> list[float]:
        """Seconds between pieces of text."""
        return [b - a for a, b in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Report:
    """All samples of one workload."""

    workload: Workload
    samples: Sequence[Sample]
    seconds: float  # from the first request sent to the last one ended

    def summary(self) -> dict[str, Any]:
        """Rates, and p50, p90, p99 and mean of each latency in seconds; JSON values only.

        Tokens need not be text (a model of made-up weights says many that its tokenizer doesn't know): requests without
        any text count for the rates, and for the latencies that need none.
        """
        good = [s for s in self.samples if not s.error and s.output_tokens]
        said = [s for s in good if s.pieces]
        output = sum(s.output_tokens for s in good)
        prompt = sum(s.prompt_tokens for s in good)
        latencies = {
            "ttft": [s.ttft for s in said],
            "itl": [gap for s in said for gap in s.gaps],
            "tpot": [(s.end - s.pieces[0]) / (s.output_tokens - 1) for s in said if s.output_tokens > 1],
            "e2e": [s.end - s.start for s in good],
        }
        return {
            "concurrency": self.workload.concurrency,
            "requests": len(self.samples),
            "failed": len(self.samples) - len(good),
            "errors": sorted({s.error for s in self.samples if s.error}),
            "seconds": self.seconds,
            "requests_per_second": len(good) / self.seconds,
            "output_tokens_per_second": output / self.seconds,
            "total_tokens_per_second": (output + prompt) / self.seconds,
            "prompt_tokens": prompt,
            "cached_tokens": sum(s.cached_tokens for s in good),
            "output_tokens": output,
            **{name: percentiles(values) for name, values in latencies.items()},
        }


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p90, p99 by linear interpolation, and the mean; None of nothing."""
    if not values:
        return None
    ranked = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ranked) - 1)
        low, high = ranked[int(place)], ranked[min(int(place) + 1, len(ranked) - 1)]
        return min(high, low + (high - low) * (place - int(place)))  # rounding may not take it past its neighbour

    return {"p50": at(0.5), "p90": at(0.9), "p99": at(0.99), "mean": sum(ranked) / len(ranked)}


async def run(
    endpoint: Endpoint, model: str, workload: Workload, on_end: Callable[[Sample], None] = lambda sample: None
) -> Report:
    """Put the load on. A request that fails is a sample with an error; the others go on."""
    queue = iter(zip(workload.prompts(), workload.arrivals(), strict=True))
    samples: list[Sample] = []
    start = time.perf_counter()

    async def work() -> None:
        for prompt, arrival in queue:
            await asyncio.sleep(max(0.0, start + arrival - time.perf_counter()))
            sample = await _request(endpoint, model, workload, prompt)
            samples.append(sample)
            on_end(sample)

    async with asyncio.TaskGroup() as group:
        for _ in range(min(workload.concurrency, workload.requests)):
            group.create_task(work())
    return Report(workload, samples, time.perf_counter() - start)


async def _request(endpoint: Endpoint, model: str, workload: Workload, prompt: str) -> Sample:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": workload.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if workload.ignore_eos:
        body["ignore_eos"] = True
    body |= {"messages": [{"role": "user", "content": prompt}]} if workload.chat else {"prompt": prompt}
    sample = Sample(time.perf_counter())
    try:
        async for event in endpoint.events("/v1/chat/completions" if workload.chat else "/v1/completions", body):
            if any(_text(choice) for choice in event["choices"]):
                sample.pieces.append(time.perf_counter())
            _count(sample, event.get("usage"))
    except EndpointError as error:
        sample.error = str(error)
    sample.end = time.perf_counter()
    sample.output_tokens = sample.output_tokens or len(sample.pieces)
    return sample


def _text(choice: dict[str, Any]) -> str | None:
    text: str | None = choice["delta"].get("content") if "delta" in choice else choice["text"]
    return text


def _count(sample: Sample, usage: dict[str, Any] | None) -> None:
    if usage:
        sample.prompt_tokens = usage["prompt_tokens"]
        sample.output_tokens = usage["completion_tokens"]
        sample.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


__all__ = ["Report", "Sample", "Workload", "percentiles", "run"]
