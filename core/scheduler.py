"""Continuous batching: who computes how many tokens in the next step.

Owns the requests and asks the KV cache for pages; knows no tensor and no device. `schedule` may run ahead of `commit`
by one step, so tokens that are sampled but not yet known count as `in_flight`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from engine.batch import Admission, Entry, EntryResult, StepBatch, StepResult
from engine.errors import EngineError
from engine.messages import FinishReason, Output
from engine.pacing import Pacing
from engine.request import Request, Status
from engine.specs.kv_cache import KVCache
from engine.specs.observer import RequestEvent, Stage
from engine.specs.scheduling import SchedulingPolicy
from engine.specs.speculator import Draft
from engine.step_builder import Limits, StepBuilder
from engine.underway import Underway

_NO_DRAFT: Final = Draft()


class QueueFull(EngineError):
    """The waiting queue has no place left."""


@dataclass(slots=True)
class Launched:
    """A step on its way, with the requests behind its entries and the admissions they had."""

    batch: StepBatch
    requests: list[Request]
    admissions: list[int]
    began: float  # by the clock of the pacing


class Drafts:
    """What the scheduler tells about drafts; this one drafts nothing."""

    def accepted(self, request: Request, drafted: int, got: EntryResult) -> None:
        """A step of the request is in, with so many draft tokens in it."""

    def forget(self, request_id: str) -> None:
        """The request finished or was preempted."""

    def follows(self, request: Request) -> bool:
        """Whether a resident speculator keeps up with the request."""
        return False


class Transfers:
    """Who else may hold the pages of a request; this one never does."""

    def keep(self, request: Request, reason: FinishReason) -> bool:
        """Asked when a request that holds pages finishes; True means that its pages are closed later by the asked."""
        return False

    def handle(self, request_id: str) -> dict[str, Any] | None:
        """What a client needs to continue the finished request in another engine, if its KV was published."""
        return None


class Scheduler:
    """Waiting and running requests of one engine."""

    def __init__(
        self,
        cache: KVCache,
        policy: SchedulingPolicy,
        limits: Limits,
        *,
        drafts: Drafts | None = None,
        transfers: Transfers | None = None,
        pacing: Pacing | None = None,
        emit: Callable[[RequestEvent], None] = lambda event: None,
    ) -> None:
        self.cache, self.policy, self.limits, self.pacing = cache, policy, limits, pacing or Pacing()
        self.drafts, self.transfers, self._emit = drafts or Drafts(), transfers or Transfers(), emit
        self.requests: dict[str, Request] = {}
        self.waiting: dict[str, Request] = {}
        self.running: dict[str, Request] = {}  # in order of admission; includes those that fetch their KV
        self._free_slots = list(range(limits.max_running))[::-1]
        self._underway = Underway(self._cached_prefix)
        self._blocked: tuple[str, int] | None = None  # who found too few pages, and how many there were
        self.steps = 0
        self.preemptions = 0

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            QueueFull: with a sentence for the client.
        """
        if len(self.waiting) >= self.limits.max_waiting + len(self._free_slots):
            raise QueueFull(f"the queue is full ({len(self.waiting)} requests are waiting); try again later")
        self.requests[request.id] = self.waiting[request.id] = request
        self._tell(Stage.QUEUED, request)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free what it holds; False when it is not known (any more)."""
        if (request := self.requests.get(request_id)) is None:
            return False
        self.finish(request, FinishReason.ABORT)
        return True

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, whatever it was doing. A step in flight may still write its pages: the next step that could
        reuse them is launched later, and steps run in order."""
        holds_pages = request.id in self.running
        self._leave(request)
        del self.requests[request.id]
        request.status = Status.FINISHED
        if holds_pages and not self.transfers.keep(request, reason):
            self.cache.close(request.id)
        self.drafts.forget(request.id)
        self._tell(Stage.FINISHED, request, reason)

    def resume_fetched(self, request: Request, num_computed: int) -> None:
        """The KV of `num_computed` tokens has arrived (or has not, then it is what the local cache had)."""
        request.status = Status.RUNNING
        request.num_computed = num_computed
        request.cached_tokens = max(request.cached_tokens, num_computed)
        self.cache.commit(request.id, request.tokens, num_computed)

    # One step

    def schedule(self, drafts: Mapping[str, Draft | int] | None = None) -> Launched | None:
        """The next step, or None when nothing can be computed: decodes, then prefills under way, then new requests.

        `drafts` has for some of the decoding requests what to verify, or how many tokens a resident may draft.
        Every stream that decodes is part of it, however small the token budget and however long a prompt.
        """
        decoding = [r for r in self.running.values() if r.remaining == 1]
        prefilling = [r for r in self.running.values() if r.remaining > 1]
        step = StepBuilder(self.limits, owed=len(decoding))
        for request in decoding:
            step.owed -= 1
            self._extend(step, request, (drafts or {}).get(request.id))
        step.room = self.pacing.room(step.entries)
        for request in prefilling:
            self._extend(step, request, None)
        self._admit(step)
        if not step.entries and not step.admissions:
            return None
        self.steps += 1
        order = sorted(range(len(step.entries)), key=lambda i: step.entries[i].count > 1)
        requests = [step.requests[i] for i in order]
        batch = StepBatch(number=self.steps, admissions=step.admissions, entries=[step.entries[i] for i in order])
        return Launched(batch, requests, [r.admissions for r in requests], self.pacing.now())

    def commit(self, launched: Launched, result: StepResult) -> list[Output]:
        """Take in what a step computed: grow, stop and free requests. Returns the news for their clients."""
        outputs = []
        for entry, request, admission, got in zip(
            launched.batch.entries, launched.requests, launched.admissions, result.entries, strict=True
        ):
            if entry.samples:
                request.in_flight -= 1
            if request.status is Status.FINISHED:
                continue
            if got.failed:
                self.finish(request, FinishReason.ERROR)
                outputs.append(Output(request.id, finish_reason=FinishReason.ERROR, error=got.fault))
                continue
            if (output := self._grow(entry, request, admission, got)) is not None:
                outputs.append(output)
        return outputs

    def fail(self, launched: Launched, reason: str) -> list[Output]:
        """The step raised: end its requests with an error and go on without them."""
        outputs = []
        for entry, request in zip(launched.batch.entries, launched.requests, strict=True):
            request.in_flight -= entry.samples
            if request.status is not Status.FINISHED:
                self.finish(request, FinishReason.ERROR)
                outputs.append(Output(request.id, finish_reason=FinishReason.ERROR, error=reason))
        return outputs

    # Parts of a step

    def _extend(self, step: StepBuilder, request: Request, draft: Draft | int | None) -> None:
        """Give a running request its next tokens, preempting others if pages are short."""
        if request.status is not Status.RUNNING or request.id not in self.running or step.full:
            return
        if request.in_flight and request.num_tokens >= request.max_len:
            return  # it will have ended by its length
        count = step.fit(request.remaining, request.num_computed)
        wanted = draft if isinstance(draft, int) else len(draft.tokens) if draft else 0
        room = max(0, min(wanted, step.budget - step.owed - count))
        while not self.cache.allocate(request.id, request.num_computed + count + room):
            if room:  # never worth a preemption
                room = 0
                continue
            victim = self._victim(step, request)
            self.preempt(victim)
            step.preempted = True
            if victim is request:
                return
        step.add(request, self._entry(request, count, draft, room))

    def _victim(self, step: StepBuilder, request: Request) -> Request:
        """Who yields its pages: somebody that is not part of this step yet."""
        candidates = [r for r in self.running.values() if r not in step.requests and r.status is Status.RUNNING]
        return self.policy.victim(candidates, request)

    def preempt(self, request: Request) -> None:
        """Take the pages back; the request waits and computes all its tokens again (or finds them cached)."""
        self.preemptions += 1
        self.cache.close(request.id)
        self._leave(request)
        request.status, request.num_computed = Status.WAITING, 0
        self.waiting[request.id] = request
        self.drafts.forget(request.id)
        self._tell(Stage.PREEMPTED, request)

    def _admit(self, step: StepBuilder) -> None:
        """Let waiting requests in, in the order of the policy, while there is budget, a slot and memory."""
        if not self.waiting or not self._free_slots or step.full or step.preempted:
            return  # who was just preempted for want of pages must not come back in the same step
        waiting = list(self.waiting.values())
        for request in self.policy.order(waiting, time.monotonic(), self._cached_prefix):
            if not self._free_slots or step.full:
                return
            if request.in_flight or request.compiling:
                continue  # preempted in the step before, so its last token is not known yet; or not ready for its first
            if self._looks_for_prefix(request) and self._underway.computes(request):
                continue
            if self._blocked == (request.id, self.cache.available()):
                return  # nothing has changed since it did not fit
            if not self._open(step, request):
                self._blocked = request.id, self.cache.available()
                return

    def _open(self, step: StepBuilder, request: Request) -> bool:
        """Admit one request: pin its prefix and give it its first chunk. False when memory is short."""
        salt = f"\0alone:{request.id}" if request.params.prompt_logprobs is not None else request.cache_salt
        match = self.cache.open(request.id, request.tokens, salt)
        remaining = len(request.tokens) - match.num_tokens
        count = step.fit(remaining, match.num_tokens)
        fetches = request.kv_source is not None
        while not self.cache.allocate(request.id, len(request.tokens)):
            victim = self._victim(step, request)
            if victim is request:
                self.cache.close(request.id)
                return False
            self.preempt(victim)
        del self.waiting[request.id]
        self.running[request.id] = request
        request.slot = self._free_slots.pop()
        request.num_computed, request.sent_pages = match.num_tokens, 0
        if not request.admissions:
            request.cached_tokens = match.num_tokens
            self.policy.served(request, remaining)
            self._tell(Stage.ADMITTED, request)
        else:
            self._tell(Stage.RESUMED, request)
        request.admissions += 1
        request.status = Status.FETCHING if fetches else Status.RUNNING
        step.admissions.append(self._admission(request, match.num_tokens))
        if not fetches:
            if self._looks_for_prefix(request):
                self._underway.admitted(request)
            step.add(request, self._entry(request, count))
        return True

    def _looks_for_prefix(self, request: Request) -> bool:
        return self.cache.reuses and request.kv_source is None and request.params.prompt_logprobs is None

    def _entry(self, request: Request, count: int, draft: Draft | int | None = None, room: int = 0) -> Entry:
        table = self.cache.block_table(request.id)
        first_page, start = request.sent_pages, request.num_computed
        request.sent_pages = len(table)
        samples = start + count == request.num_tokens
        assert request.slot is not None, "a scheduled request holds a slot"
        computes_prompt = start < request.prompt_len and request.params.prompt_logprobs is not None
        request.num_computed += count + room
        request.in_flight += samples
        given = draft if isinstance(draft, Draft) and room else _NO_DRAFT
        return Entry(
            slot=request.slot,
            start=start,
            count=count + room,
            samples=samples,
            first_page=first_page,
            new_pages=table[first_page:],
            drafts=list(given.tokens[:room]),
            draft_parents=given.parents[:room] if given.parents is not None else None,
            draft_probs=given.probs[:room] if given.probs is not None else None,
            draft_slots=room if isinstance(draft, int) else 0,
            follow=self.drafts.follows(request),
            prompt_logprobs=request.params.prompt_logprobs if computes_prompt else None,
        )

    def _admission(self, request: Request, cached: int) -> Admission:
        assert request.slot is not None, "an admitted request holds a slot"
        stops = tuple(request.params.stop_token_ids)
        return Admission(
            slot=request.slot,
            tokens=list(request.tokens),
            prompt_len=request.prompt_len,
            params=request.params,
            seed=request.seed,
            stop_ids=stops if request.params.ignore_eos else (*stops, *request.eos),
            cached=cached,
        )

    def _grow(self, entry: Entry, request: Request, admission: int, got: EntryResult) -> Output | None:
        """Append what was sampled, settle the pages, and end the request if it is done."""
        first = request.num_output == 0
        taken, reason, stop_token = request.append(got.tokens)
        if admission == request.admissions and request.status is Status.RUNNING:
            self._settle(entry, request, got)
        self.policy.served(request, len(taken))
        if first and taken:
            self._tell(Stage.FIRST_TOKEN, request)
        if reason is not None:
            self.finish(request, reason)
        if not taken and got.prompt_logprobs is None:
            return None
        return Output(
            request.id,
            token_ids=taken,
            logprobs=got.logprobs[: len(taken)] if got.logprobs is not None else None,
            prompt_logprobs=list(got.prompt_logprobs) if got.prompt_logprobs is not None else None,
            finish_reason=reason,
            stop_token=stop_token,
            cached_tokens=request.cached_tokens,
            kv_transfer=self.transfers.handle(request.id) if reason is not None else None,
        )

    def _settle(self, entry: Entry, request: Request, got: EntryResult) -> None:
        """Roll back the KV of rejected drafts and make what was computed matchable."""
        computed = entry.start + entry.count
        if room := max(len(entry.drafts), entry.draft_slots):
            computed -= room + 1 - len(got.tokens)
            request.num_computed = computed
            self.cache.trim(request.id, computed + 1)
            request.sent_pages = min(request.sent_pages, len(self.cache.block_table(request.id)))
        self.drafts.accepted(request, got.drafted, got)
        self.cache.commit(request.id, request.tokens, min(computed, len(request.tokens)))

    def _leave(self, request: Request) -> None:
        self.waiting.pop(request.id, None)
        if self.running.pop(request.id, None) is not None and request.slot is not None:
            self._free_slots.append(request.slot)
            request.slot = None

    def _cached_prefix(self, request: Request) -> int:
        return self.cache.match(request.tokens, request.cache_salt).num_tokens

    def _tell(self, stage: Stage, request: Request, reason: str = "") -> None:
        self._emit(
            RequestEvent(
                stage,
                request.id,
                time.monotonic(),
                request.prompt_len,
                request.num_output,
                request.cached_tokens,
                reason,
            )
        )


__all__ = ["Launched", "Limits", "QueueFull", "Scheduler"]
