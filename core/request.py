"""One sequence on its way through the engine, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from engine.messages import FinishReason
from engine.sampling_params import SamplingParams
from engine.specs.grammar import Matcher


class Status(StrEnum):
    """Where a request stands. Running and fetching ones hold pages and a slot."""

    WAITING = "waiting"
    FETCHING = "fetching"  # its KV is on the way from another engine
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """A request. `num_computed` chases `num_tokens`: prefill, chunks, prefix hits, fetched KV, draft verification and
    recomputation after preemption are all the same thing, namely how many tokens are left to compute."""

    id: str
    tokens: list[int]  # prompt and output, as far as the host knows them
    prompt_len: int
    params: SamplingParams
    seed: int
    max_len: int  # prompt and output together may not pass this
    eos: frozenset[int]
    arrival: float  # seconds, monotonic
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""  # who asks; what a fair scheduling policy shares between
    weight: float = 1.0  # the tenant's share
    kv_source: dict[str, Any] | None = None  # handle of KV that another engine computed
    kv_export: bool = False  # publish the KV at the end
    constraint: Future[Matcher] | None = None  # what the grammar component makes; kept as long as the request is
    compiling: bool = False  # may not be admitted yet
    status: Status = Status.WAITING
    slot: int | None = None
    admissions: int = 0  # how often it was admitted; tells a step's result whether its pages are still the same
    num_computed: int = 0  # tokens whose KV is in the cache once the launched steps have run
    in_flight: int = 0  # sampled on the device, not yet known here
    cached_tokens: int = 0  # prompt tokens that the first admission found computed
    sent_pages: int = field(default=0)  # pages of the block table that the runner knows

    @property
    def num_tokens(self) -> int:
        """Tokens that exist, those in flight included."""
        return len(self.tokens) + self.in_flight

    @property
    def remaining(self) -> int:
        """Tokens left to compute: one for a decode, more for a prefill, none while everything is launched."""
        return self.num_tokens - self.num_computed

    @property
    def num_output(self) -> int:
        """Output tokens known to the host."""
        return len(self.tokens) - self.prompt_len

    @property
    def draft_room(self) -> int:
        """How many draft tokens may follow the next token without passing `max_len`."""
        return self.max_len - len(self.tokens) - 1

    def append(self, tokens: Sequence[int]) -> tuple[list[int], FinishReason | None, int | None]:
        """Add sampled tokens up to the first that ends the request.

        Returns:
            The tokens taken, the finish reason if one was met, and the stop token id if it was one the client named.
        """
        params, taken = self.params, []
        for token in tokens:
            self.tokens.append(token)
            taken.append(token)
            if params.structured is not None and token in self.eos:
                return taken, FinishReason.STOP, None  # sampled where nothing else may come, if it isn't wanted
            if self.num_output > params.min_tokens or not params.min_tokens:
                if token in params.stop_token_ids:
                    return taken, FinishReason.STOP, token
                if token in self.eos and not params.ignore_eos:
                    return taken, FinishReason.STOP, None
            if len(self.tokens) >= self.max_len:
                return taken, FinishReason.LENGTH, None
        return taken, None, None


__all__ = ["Request", "Status"]
