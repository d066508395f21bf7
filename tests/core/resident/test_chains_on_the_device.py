"""The way of CUDA: chains that the host never sees, verified, followed and drafted anew on the device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from engine.testing.twin import Twin

pytest.importorskip("triton")

from engine.cuda import drafts
from engine.cuda.runner import CudaRunner


@pytest.mark.parametrize(
    ("names", "budget", "preempt"),
    [
        (("greedy", "same beginning"), 64, False),
        (("greedy", "same beginning"), 13, True),
        (("one", "drawn"), 64, False),
    ],
    ids=str,
)
@pytest.mark.usefixtures("one_thread")
def test_chains_that_stay_on_the_device_leave_the_text_as_it_is(
    names: Sequence[str],
    budget: int,
    preempt: bool,
    bench: Any,
    asked: Any,
    plain: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And all of the twin's greedy chains are accepted."""
    steps: list[int] = []
    follow = drafts.DeviceDrafting.follow
    monkeypatch.setattr(drafts.DeviceDrafting, "follow", lambda self, n: (steps.append(n), follow(self, n))[1])
    few = {n: (asked[n][0], asked[n][1] | {"max_tokens": 12}) for n in names}
    with bench(Twin(), budget=budget, kind=partial(CudaRunner, token_budget=64, graphs=False)) as it:
        it.serve(few, preempt)
        for request in few:
            assert it.tokens(request) == plain.tokens(request)[:12], request
        assert len(steps) >= 2, "hardly a step stayed on the device"
        assert it.engine.drafter is not None
        counters = it.engine.drafter.counters
        assert counters.faults == 0
        assert "drawn" in names or counters.accepted == counters.drafted > 10
