from __future__ import annotations

import pytest

from engine.batch import Entry, StepBatch
from engine.messages import Output, Timing
from engine.specs.observer import RequestEvent, Stage
from engine.timing import Timekeeper


def tell(times: Timekeeper, stage: Stage, at: float, name: str = "a", reason: str = "") -> None:
    times.follow(RequestEvent(stage, name, at, 10, 1, 0, reason))


def step(times: Timekeeper, at: float, *counts: int) -> None:
    entries = [
        Entry(
            slot=i, start=0, count=count, samples=True, first_page=0, new_pages=[], drafts=[], draft_probs=None,
            prompt_logprobs=None,
        )
        for i, count in enumerate(counts)
    ]  # fmt: skip
    times.step(StepBatch(number=1, admissions=[], entries=entries), at)


def stamped(times: Timekeeper, name: str = "a") -> Timing | None:
    (output,) = times.stamp([Output(name, token_ids=[1])])
    return output.timing


def test_the_parts_add_up_to_the_life_of_a_request() -> None:
    times = Timekeeper()
    tell(times, Stage.QUEUED, 1.0)
    tell(times, Stage.ADMITTED, 1.5)
    step(times, 2.0, 10)
    tell(times, Stage.FIRST_TOKEN, 2.0)
    for at in (2.1, 2.2, 2.3):
        step(times, at, 1)
    tell(times, Stage.FINISHED, 2.3, reason="stop")
    found = stamped(times)
    assert found is not None
    assert (found.queue, found.prefill, found.decode) == pytest.approx((0.5, 0.5, 0.3))
    assert (found.steps, found.preemptions, found.stalled) == (3, 0, 0.0)
    assert stamped(times) is None  # told once


def test_the_first_token_brings_what_is_known_by_then() -> None:
    times = Timekeeper()
    tell(times, Stage.QUEUED, 1.0)
    tell(times, Stage.ADMITTED, 1.5)
    tell(times, Stage.FIRST_TOKEN, 2.5)
    assert stamped(times) == Timing(queue=0.5, prefill=1.0, decode=0.0)
    tell(times, Stage.FINISHED, 3.0, reason="length")
    assert stamped(times) == Timing(queue=0.5, prefill=1.0, decode=0.5)


def test_prompts_of_others_show_as_stalls_of_those_who_decode() -> None:
    times = Timekeeper()
    for name in "ab":
        tell(times, Stage.QUEUED, 0.0, name)
        tell(times, Stage.ADMITTED, 0.0, name)
    step(times, 0.1, 10)
    tell(times, Stage.FIRST_TOKEN, 0.1)
    step(times, 0.2, 1)
    step(times, 0.8, 1, 500)  # half a second longer than a step without a prompt
    tell(times, Stage.FIRST_TOKEN, 0.8, "b")
    step(times, 0.9, 1, 1)
    for name in "ab":
        tell(times, Stage.FINISHED, 0.9, name, "length")
    first, second = (output.timing for output in times.stamp([Output("a"), Output("b")]))
    assert first is not None
    assert second is not None
    assert first.stalled == pytest.approx(0.5)
    assert second.stalled == 0.0


def test_the_wait_after_a_preemption_is_counted_until_the_request_is_back() -> None:
    times = Timekeeper()
    tell(times, Stage.QUEUED, 0.0)
    tell(times, Stage.ADMITTED, 0.0)
    tell(times, Stage.FIRST_TOKEN, 1.0)
    tell(times, Stage.PREEMPTED, 2.0)
    tell(times, Stage.RESUMED, 5.0)
    tell(times, Stage.PREEMPTED, 6.0)
    tell(times, Stage.FINISHED, 6.5, reason="error")
    found = stamped(times)
    assert found is not None
    assert (found.preemptions, found.preempted, found.decode) == (2, 3.5, 5.5)


def test_who_was_aborted_or_never_admitted_has_no_timing_and_leaves_nothing() -> None:
    times = Timekeeper()
    tell(times, Stage.QUEUED, 0.0)
    tell(times, Stage.FINISHED, 1.0, reason="error")
    assert stamped(times) is None
    tell(times, Stage.QUEUED, 0.0)
    tell(times, Stage.ADMITTED, 0.0)
    tell(times, Stage.FINISHED, 1.0, reason="abort")
    tell(times, Stage.FIRST_TOKEN, 1.0, "never queued")
    assert stamped(times) is None
    assert (times._lives, times._news) == ({}, {})
