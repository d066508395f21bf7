"""The engine: requests in, tokens out, one step at a time.

    batch   = scheduler.schedule()       who computes how many tokens
    pending = executor.launch(batch)     forward pass and sampling
    scheduler.commit(pending.result())   append, stop, free, publish

Owns no thread; whoever calls `step` drives it (see `engine.process`, `engine.llm`).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from engine.compiling import Compiling
from engine.drafting import Drafter
from engine.errors import ResourceError
from engine.handover import Handover
from engine.messages import Add, FinishReason, Output
from engine.observation import Observation
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.scheduler import Launched, QueueFull, Scheduler
from engine.specs.executor import Executor, Pending
from engine.specs.speculator import Draft
from engine.trace import Tracer

log = logging.getLogger(__name__)

_FAILURES_IN_A_ROW = 3
"""So many failed steps in a row, and it is not the requests that are at fault."""


class Engine:
    """Scheduler, executor and what stands beside them.

    Args:
        overlap: schedule a step while the one before runs. Steps that draft wait, since a draft needs the tokens of the
            step before.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        executor: Executor,
        handover: Handover,
        observation: Observation,
        *,
        drafter: Drafter | None,
        overlap: bool,
        max_context: int,
        eos: frozenset[int],
        vocab_size: int,
        compiling: Compiling | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.scheduler, self.executor = scheduler, executor
        self.handover, self.observation, self.drafter = handover, observation, drafter
        self.compiling, self.tracer = compiling or Compiling(), tracer or Tracer()
        self.max_context, self._eos, self._vocab_size = max_context, eos, vocab_size
        self._step: Callable[[], list[Output]] = self.step_overlapped if overlap else self.step_plain
        self._ahead: tuple[Launched, Pending] | None = None
        self._failures = 0
        self.idle = True  # the last step had nothing to launch and nothing to commit

    def add(self, add: Add) -> Output | None:
        """Queue a request, or return the output that says why not."""
        if (fault := self._fault(add)) is not None:
            return Output(add.request_id, finish_reason=FinishReason.ERROR, error=fault, invalid=True)
        source = add.kv_transfer or {}
        limit = self.max_context - len(add.prompt)
        request = Request(
            id=add.request_id,
            tokens=list(add.prompt),
            prompt_len=len(add.prompt),
            params=add.params,
            seed=random.getrandbits(64) if add.params.seed is None else add.params.seed,
            max_len=len(add.prompt) + min(limit, limit if add.params.max_tokens is None else add.params.max_tokens),
            eos=self._eos,
            arrival=time.monotonic(),
            priority=add.priority,
            cache_salt=add.cache_salt,
            tenant=add.tenant,
            weight=add.weight,
            kv_source=add.kv_transfer if source.get("do_remote_prefill") else None,
            kv_export=bool(source.get("do_remote_decode")),
        )
        try:
            self.scheduler.add(request)
        except QueueFull as error:
            return Output(add.request_id, finish_reason=FinishReason.ERROR, error=str(error), refused=True)
        self.compiling.start(request, request.arrival)
        return None

    def _fault(self, add: Add) -> str | None:
        """What is wrong with a request, whoever sent it: the engine trusts no client and no server."""
        if add.request_id in self.scheduler.requests:
            return f"a request with the id {add.request_id!r} is running"
        if not add.prompt:
            return "the prompt is empty"
        if len(add.prompt) >= self.max_context:
            limit = f"the maximum context length is {self.max_context} tokens, output included"
            return f"the prompt has {len(add.prompt)} tokens; {limit}"
        if min(add.prompt) < 0 or max(add.prompt) >= self._vocab_size:
            return f"the prompt has token ids outside the vocabulary of {self._vocab_size}"
        allowed = add.params.allowed_token_ids
        if allowed is not None and not all(0 <= token < self._vocab_size for token in allowed):
            return f"allowed_token_ids has ids outside the vocabulary of {self._vocab_size}"
        if add.params.max_tokens is not None and add.params.max_tokens < 1:
            return "max_tokens must be at least 1"
        if (fault := self._speculation_fault(add.params)) is not None:
            return fault
        if (fault := self.compiling.fault(add.params.structured)) is not None:
            return fault
        return self.handover.fault(add.request_id, add.kv_transfer or {})

    def _speculation_fault(self, params: SamplingParams) -> str | None:
        asked = params.speculation.method if params.speculation is not None else None
        installed = self.drafter.name if self.drafter is not None else "none"
        if asked in (None, "none", installed):
            return None
        other = f"{installed!r}: name that or 'none'" if self.drafter is not None else "nothing: say 'none'"
        return f"speculation.method is {asked!r}, but this engine speculates with {other}, or leave it out"

    def abort(self, request_ids: Sequence[str]) -> None:
        """Forget requests that nobody waits for; unknown ids are ignored, since they may just have finished."""
        for request_id in request_ids:
            self.scheduler.abort(request_id)

    @property
    def has_work(self) -> bool:
        """Whether a step would do something."""
        return bool(self.scheduler.requests or self._ahead)

    def step(self) -> list[Output]:
        """One step, with drafts if they are due."""
        if self.drafter is None or not self.drafter.due(self.scheduler.running.values()):
            return self._step()
        before, self._ahead = self._ahead, None
        caught_up = self._commit(*before) if before else []
        outputs = caught_up + self.step_plain(self.drafter)
        self.idle = self.idle and before is None
        return outputs

    def step_plain(self, drafter: Drafter | None = None) -> list[Output]:
        """One step from schedule to commit; the drafter, if one is given, is asked for drafts."""
        refused = self._look_around()
        launched = self._schedule(drafter.propose(self.scheduler.running.values()) if drafter else None)
        self.handover.start_fetches()
        self.idle = launched is None
        if launched is None:
            return refused
        return refused + self._commit(launched, self._launch(launched))

    def step_overlapped(self) -> list[Output]:
        """Schedule and launch a step, then commit the one before, which ran meanwhile."""
        refused = self._look_around()
        launched = self._schedule()
        before, self._ahead = self._ahead, (launched, self._launch(launched)) if launched else None
        self.idle = launched is None and before is None
        outputs = self._commit(*before) if before else []
        self.handover.start_fetches()
        return refused + outputs

    def _schedule(self, drafts: Mapping[str, Draft | int] | None = None) -> Launched | None:
        with self.tracer.span("engine", "schedule", self.scheduler.steps + 1):
            return self.scheduler.schedule(drafts)

    def _launch(self, launched: Launched) -> Pending:
        with self.tracer.span("engine", "launch", launched.batch.number):
            return self.executor.launch(launched.batch)

    def _look_around(self) -> list[Output]:
        """Take in what happened beside the steps; returns the news of requests that can't be computed."""
        now = time.monotonic()
        self.handover.advance(now)
        outputs = []
        for request, reason in self.compiling.advance(now):
            self.scheduler.finish(request, FinishReason.ERROR)
            outputs.append(Output(request.id, finish_reason=FinishReason.ERROR, error=reason, invalid=True))
        return outputs

    def _commit(self, launched: Launched, pending: Pending) -> list[Output]:
        try:
            with self.tracer.span("engine", "wait", launched.batch.number):
                result = pending.result()
        except ResourceError as error:  # of this step alone: there is no room for its tokens
            log.error("step %d: %s", launched.batch.number, error)
            return self.scheduler.fail(launched, str(error))
        except Exception as error:
            self._failures += 1
            if self._failures >= _FAILURES_IN_A_ROW:
                raise
            log.exception(
                "step %d failed; its %d requests end with an error", launched.batch.number, len(launched.requests)
            )
            return self.scheduler.fail(launched, f"the step failed: {type(error).__name__}: {error}")
        self._failures = 0
        self.observation.times.step(launched.batch, time.monotonic())
        self.scheduler.pacing.measured(launched.batch.entries, launched.began)
        if self.drafter is not None:
            self.drafter.measured(launched.batch, result)
        with self.tracer.span("engine", "commit", launched.batch.number):
            return self.observation.times.stamp(self.scheduler.commit(launched, result))

    def stats(self) -> dict[str, Any]:
        """Counters for metrics; JSON values only."""
        return {
            "running": len(self.scheduler.running),
            "waiting": len(self.scheduler.waiting),
            "steps": self.scheduler.steps,
            "preemptions": self.scheduler.preemptions,
            "pacing": self.scheduler.pacing.stats(),
            "kv_cache": asdict(self.scheduler.cache.stats()),
            "drafts": self.drafter.stats() if self.drafter else {},
            "transfers": self.handover.rows(),
            "transfers_ended": self.handover.totals(),
            "fetch": self.handover.measured(),
        }

    def close(self) -> None:
        """Stop the device, the transports and the observers."""
        self.executor.close()
        self.compiling.close()
        self.handover.close()
        self.observation.close()


__all__ = ["Engine"]
