"""Between scheduler and transfer ledger: which requests' pages are on their way to or from another engine.

A request that fetches its KV holds its pages and a slot but computes nothing until the fetch ends; if it fails, the
prompt is computed here. A request whose KV is published keeps its pages open until the ledger releases them.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from engine.cost_model import Curve
from engine.messages import FinishReason
from engine.request import Request, Status
from engine.scheduler import Scheduler, Transfers
from engine.transfer import TransferLedger, remote_tokens

log = logging.getLogger(__name__)


class Handover(Transfers):
    """Applies what the ledger says to requests and pages.

    Args:
        token_bytes: size of one token's KV, to tell the speed of the link.
    """

    def __init__(self, ledger: TransferLedger, *, engine_id: str, page_size: int, token_bytes: int = 0) -> None:
        self._token_bytes = token_bytes
        self._ledger, self._engine_id, self._page_size = ledger, engine_id, page_size
        self._fetching: dict[str, Request] = {}
        self._published: dict[str, dict[str, Any]] = {}
        self._begun: dict[str, tuple[float, int]] = {}  # of fetches: when, how many tokens
        self._fetches = Curve()

    def keep(self, request: Request, reason: FinishReason) -> bool:
        if request.id in self._fetching:
            self._ledger.cancel(request.id)
            return True
        if not request.kv_export or reason not in (FinishReason.STOP, FinishReason.LENGTH):
            return False
        # A step in flight may still write behind the prompt in its last page, so only what is before it stands still.
        tokens = (
            request.prompt_len if not request.in_flight else request.prompt_len // self._page_size * self._page_size
        )
        if not tokens:
            return False
        pages = self._scheduler.cache.block_table(request.id)[: -(-tokens // self._page_size)]
        handle = self._ledger.publish(request.id, list(pages), tokens)
        self._published[request.id] = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self._engine_id,
            "remote_request_id": request.id,
            "handle": handle,
        }
        return True

    def handle(self, request_id: str) -> dict[str, Any] | None:
        return self._published.get(request_id)

    def fault(self, request_id: str, params: dict[str, Any]) -> str | None:
        """What is wrong with a request's transfer parameters, in one sentence."""
        for key in ("do_remote_decode", "do_remote_prefill"):
            if not isinstance(params.get(key), bool | None):
                return f"kv_transfer_params.{key} must be true or false, not {params[key]!r}"
        if request_id in self._published:
            return f"the KV of a request with the id {request_id!r} is still published"
        if params.get("do_remote_decode") and not self._ledger.produces:
            return (
                "kv_transfer_params asks for do_remote_decode, but no KV connector here has the role producer or both"
            )
        if not params.get("do_remote_prefill"):
            return None
        if not self._ledger.consumes:
            return (
                "kv_transfer_params asks for do_remote_prefill, but no KV connector here has the role consumer or both"
            )
        handle = params.get("handle")
        if not isinstance(handle, dict):
            return "kv_transfer_params lacks handle, which the engine that computed the prompt returned"
        try:
            remote_tokens(handle)
        except ValueError as error:
            return f"kv_transfer_params.handle is malformed: {error}"
        return None

    def attach(self, scheduler: Scheduler) -> None:
        """Name the scheduler whose requests are handed over (the two know each other)."""
        self._scheduler = scheduler

    @property
    def busy(self) -> bool:
        """Whether time or a peer may change something while no step runs."""
        return bool(self._fetching or self._published)

    def start_fetches(self) -> None:
        """Begin the fetches of requests admitted since. Call it when no launched step can still write their pages, that
        is after the step before their admission was committed."""
        for request in list(self._scheduler.running.values()):
            if request.status is Status.FETCHING and request.id not in self._fetching:
                self._fetch(request)

    def _fetch(self, request: Request) -> None:
        assert request.kv_source is not None, "only requests with a source fetch"
        first = request.num_computed // self._page_size
        table = self._scheduler.cache.block_table(request.id)
        pages = table[first : max(first, -(-_covered(request) // self._page_size))]
        self._fetching[request.id] = request
        self._begun[request.id] = (time.monotonic(), _covered(request) - first * self._page_size)
        try:
            self._ledger.fetch(request.id, request.kv_source["handle"], pages, first)
        except ValueError as error:
            self._resume(request.id, f"its KV was refused: {error}")

    def advance(self, now: float) -> None:
        """Poll the transports and apply what happened; `now` is monotonic seconds."""
        released, fetched, failed = self._ledger.advance(now)
        for request_id in released:
            del self._published[request_id]
            self._scheduler.cache.close(request_id)
        for request_id in fetched:
            self._resume(request_id)
        for request_id, reason in failed:
            self._resume(request_id, reason)

    def _resume(self, request_id: str, failure: str = "") -> None:
        """The fetch ended: go on computing, or close the pages of a request that is gone by now."""
        request = self._fetching.pop(request_id)
        began, tokens = self._begun.pop(request_id)
        if not failure:
            self._fetches.add(tokens, time.monotonic() - began, time.monotonic())
        if request.status is Status.FINISHED:
            self._scheduler.cache.close(request_id)
            return
        computed = request.num_computed
        if failure:
            log.warning("request %s computes its prompt here: %s", request_id, failure)
        else:
            computed = max(computed, _covered(request))
        request.kv_source = None  # after a preemption it computes its tokens here
        self._scheduler.resume_fetched(request, computed)

    def release(self, params: dict[str, Any]) -> bool:
        """Give up the KV that these parameters, as `handle` returned them, are for: nobody will fetch it. False when it
        is not published (any more), or the parameters are not the ones that were returned."""
        request_id = params.get("remote_request_id")
        if not isinstance(request_id, str) or self._published.get(request_id) != params:
            return False
        self._ledger.cancel(request_id)
        return True

    def rows(self) -> list[dict[str, Any]]:
        """Every transfer under way, for people; JSON values only."""
        return [row._asdict() for row in self._ledger.rows()]

    def measured(self) -> dict[str, Any]:
        """Seconds that fetches took by number of tokens, as `engine.cost_model.Curve.as_dict` tells it, and the bytes
        of a token."""
        return {**self._fetches.as_dict(time.monotonic()), "token_bytes": self._token_bytes}

    def totals(self) -> dict[str, int]:
        """How many transfers ended, by how they did."""
        return {str(state): count for state, count in self._ledger.totals.items()}

    def close(self) -> None:
        """Stop the transports; nothing is published or fetched any more."""
        self._ledger.close()


def _covered(request: Request) -> int:
    """How many tokens need not be computed once the fetch has ended: the last is, since its logits are wanted."""
    assert request.kv_source is not None, "only requests with a source fetch"
    return min(remote_tokens(request.kv_source["handle"]), len(request.tokens) - 1)


__all__ = ["Handover"]
