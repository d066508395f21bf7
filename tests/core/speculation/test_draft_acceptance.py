"""Estimates of what is kept, the account, the alarm, the scouts and the counters."""

from __future__ import annotations

import logging
import random

import pytest

from engine.speculation.acceptance import Acceptance, context_bucket, context_name
from engine.speculation.account import Account
from engine.speculation.alarm import Alarm
from engine.speculation.counters import DraftCounters
from engine.speculation.scouts import Scouts


def test_estimates_approach_the_truth() -> None:
    rng, acceptance = random.Random(1), Acceptance(4)
    for _ in range(400):
        kept = 0
        while kept < 4 and rng.random() < (0.9, 0.8, 0.5, 0.1)[kept]:
            kept += 1
        acceptance.learn("r", 100, 4, kept)
    survival = acceptance.survival("r", 100, 4)
    assert survival == pytest.approx([0.9, 0.72, 0.36, 0.036], abs=0.17)
    assert survival == sorted(survival, reverse=True)
    assert len(acceptance.survival("r", 100, 2)) == 2


def test_a_new_request_is_taken_for_one_of_its_length() -> None:
    acceptance = Acceptance(2)
    for i in range(200):
        acceptance.learn(f"short {i}", 100, 2, 2)
        acceptance.learn(f"long {i}", 5000, 2, 0)
    assert acceptance.survival("new", 200, 1)[0] > 0.9
    assert acceptance.survival("new", 6000, 1)[0] < 0.1
    assert acceptance.survival("new", 400, 1)[0] == 0.5  # nobody of that length was seen


def test_a_request_may_differ_from_others_and_get_another_chance() -> None:
    acceptance = Acceptance(2)
    for i in range(100):
        acceptance.learn(f"r{i}", 100, 2, 2)
    for _ in range(20):
        acceptance.learn("odd", 100, 2, 0)
    low = acceptance.survival("odd", 100, 1)[0]
    assert low < 0.4 < acceptance.survival("other", 100, 1)[0]
    for _ in range(60):
        acceptance.passed_over("odd")
    assert acceptance.survival("odd", 100, 1)[0] > low + 0.2
    acceptance.forget("odd")
    acceptance.forget("never seen")
    assert acceptance.survival("odd", 100, 1) == acceptance.survival("new", 100, 1)


def test_contexts_have_names() -> None:
    assert [context_name(context_bucket(n)) for n in (0, 255, 256, 5000, 10**6)] == [
        "0-255", "0-255", "256-1023", "4096-16383", "16384-",
    ]  # fmt: skip


def test_the_account_pays_for_losses_and_holds_little() -> None:
    account = Account(0.01)
    first = account.balance
    account.settle(1.5, 1.0)
    assert account.balance == pytest.approx(first - 0.5)
    for _ in range(1000):
        account.earn()
    full = account.balance
    account.settle(1.2, 3.0)
    assert account.balance == full
    for _ in range(10):
        account.settle(1.5, 1.0)
    assert account.balance == pytest.approx(full - 5)


def test_the_alarm_rings_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    alarm = Alarm(worth=1.5)
    for step in range(150):
        if step % 20 == 0:
            alarm.learn(4, 0, 0.2)
            alarm.probed()
        alarm.step(on=False, rows=1)
        assert alarm.ringing == (step >= 99)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "a share of 0 is kept" in caplog.text
    assert "more than 0.3;" in caplog.text
    for _ in range(100):
        alarm.learn(4, 3, 0.2)
        alarm.step(on=True, rows=1)
    assert not alarm.ringing
    assert alarm.rung == 1
    assert "pay again" in caplog.text


def test_no_alarm_where_nothing_was_drafted() -> None:
    """A speculator that had nothing to say has not failed."""
    alarm = Alarm()
    for _ in range(500):
        alarm.step(on=False, rows=1)
    assert not alarm.ringing


def test_everybody_is_ready_for_a_speculator_that_reads_tokens() -> None:
    assert Scouts(resident=False).ready(["a", "b"]) == [True, True]


def test_a_resident_watches_one_request_from_its_beginning() -> None:
    scouts = Scouts(resident=True)
    assert scouts.ready(["a"]) == [False]
    assert not scouts.watches("a", fresh=True, affordable=False)
    assert scouts.watches("a", fresh=True, affordable=True)
    assert not scouts.watches("b", fresh=True, affordable=True)
    assert scouts.watches("a", fresh=False, affordable=False)
    assert scouts.ready(["a", "b"]) == [True, False]
    for _ in range(4):
        scouts.probed()
    assert scouts.ready(["a"]) == [False]
    assert not scouts.watching


def test_where_no_request_comes_an_old_one_is_watched_for_some_tokens() -> None:
    scouts = Scouts(resident=True)
    for _ in range(256):
        assert not scouts.watches("old", fresh=False, affordable=True)
        scouts.step()
    assert scouts.watches("old", fresh=False, affordable=True)
    for _ in range(32):
        assert scouts.ready(["old"]) == [False]
        scouts.step()
    assert scouts.ready(["old"]) == [True]
    scouts.forget("old")
    assert scouts.ready(["old"]) == [False]


def test_counters_sum_by_place_and_by_context() -> None:
    counters = DraftCounters(4)
    counters.count(100, 4, 2)
    counters.count(300, 3, 0)
    counters.count(300, 1, 1)
    assert (counters.steps, counters.drafted, counters.accepted) == (3, 8, 3)
    assert counters.accepted_at == [2, 1, 0, 0]
    by_context = {c.context: (c.steps, c.drafted, c.accepted) for c in counters.contexts if c.steps}
    assert by_context == {"0-255": (1, 4, 2), "256-1023": (2, 4, 1)}
