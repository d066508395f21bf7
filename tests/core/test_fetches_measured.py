"""How long fetches take is learned where they happen; what failed says nothing about the link."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from engine.handover import Handover
from engine.request import Request, Status
from engine.sampling_params import SamplingParams
from engine.specs.kv_connector import EventKind, KVConnector, TransferEvent
from engine.transfer import Link, TransferLedger


class OneEvent(KVConnector):
    """Ends every fetch in the same way."""

    def __init__(self, kind: EventKind) -> None:
        self._kind, self._events = kind, list[TransferEvent]()

    def start(self, pool: Any, wake: Callable[[], None]) -> None: ...

    def publish(self, request_id: str, pages: Sequence[int], num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        return {}

    def withdraw(self, request_id: str) -> None: ...

    def fetch(self, request_id: str, handle: dict[str, Any], pages: Sequence[int], first_page: int) -> None:
        self._events.append(TransferEvent(self._kind, request_id, "the peer is gone"))

    def cancel(self, request_id: str) -> None: ...

    def poll(self) -> list[TransferEvent]:
        events, self._events = self._events, []
        return events

    def close(self) -> None: ...


def fetched(kind: EventKind) -> tuple[Handover, list[int]]:
    """A request of 40 tokens, 8 of which are cached here, whose KV comes from elsewhere; and what it went on with."""
    ledger = TransferLedger([Link(name="one", connector=OneEvent(kind))], lambda: 0.0)
    handover, computed = Handover(ledger, engine_id="e", page_size=8, token_bytes=100), list[int]()
    request = Request(
        id="r",
        tokens=[1] * 40,
        prompt_len=40,
        params=SamplingParams(),
        seed=0,
        max_len=50,
        eos=frozenset(),
        arrival=0.0,
        kv_source={"handle": {"num_tokens": 40, "via": {"one": {}}}},
        status=Status.FETCHING,
        num_computed=8,
    )
    handover.attach(
        SimpleNamespace(  # type: ignore[arg-type]
            running={"r": request},
            cache=SimpleNamespace(block_table=lambda name: [0, 1, 2, 3, 4]),
            resume_fetched=lambda request, tokens: computed.append(tokens),
        )
    )
    handover.start_fetches()
    handover.advance(0.0)
    return handover, computed


def test_a_fetch_is_measured_by_the_tokens_that_came() -> None:
    handover, computed = fetched(EventKind.FETCHED)
    told = handover.measured()
    ((tokens, seconds),) = told["points"]
    assert (computed, tokens, told["token_bytes"]) == ([39], 31, 100)
    assert seconds >= 0
    assert told["age"] >= 0


def test_a_failure_says_nothing() -> None:
    handover, computed = fetched(EventKind.FETCH_FAILED)
    assert computed == [8]
    assert handover.measured()["points"] == []
