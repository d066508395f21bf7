"""KV that nobody will fetch is let go of when its parameters are shown, and by nobody else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from engine.handover import Handover
from engine.messages import FinishReason
from engine.request import Request
from engine.sampling_params import SamplingParams
from engine.specs.kv_connector import Role
from engine.transfer import Link, TransferLedger


class Quiet:
    """A connector to which nothing happens."""

    withdrawn = 0

    def publish(self, request_id: str, pages: Any, num_tokens: int, lease_seconds: float) -> dict[str, Any]:
        return {"token": f"secret of {request_id}"}

    def withdraw(self, request_id: str) -> None:
        self.withdrawn += 1

    def poll(self) -> list[Any]:
        return []


def test_published_kv_is_released_by_its_parameters_alone() -> None:
    connector, closed = Quiet(), list[str]()
    ledger = TransferLedger([Link(name="one", connector=connector, role=Role.PRODUCER)], lambda: 0.0)  # type: ignore[arg-type]
    handover = Handover(ledger, engine_id="e", page_size=8)
    handover.attach(SimpleNamespace(cache=SimpleNamespace(block_table=lambda name: [0, 1], close=closed.append)))  # type: ignore[arg-type]
    request = Request(
        id="r",
        tokens=[1] * 17,
        prompt_len=16,
        params=SamplingParams(),
        seed=0,
        max_len=17,
        eos=frozenset(),
        arrival=0.0,
        kv_export=True,
    )
    assert handover.keep(request, FinishReason.LENGTH)
    params = handover.handle("r")
    assert params is not None
    forged = {**params, "handle": {"num_tokens": 16, "via": {"one": {"token": "guessed"}}}}
    for wrong in ({}, {"remote_request_id": 5}, {"remote_request_id": "other"}, forged):
        assert not handover.release(wrong)
    assert (connector.withdrawn, closed) == (0, [])
    assert handover.release(dict(params))
    handover.advance(0.0)
    assert (connector.withdrawn, closed, handover.handle("r")) == (1, ["r"], None)
    assert not handover.release(params)
