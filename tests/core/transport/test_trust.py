"""Which blocks are checked, and when a peer is left alone."""

from __future__ import annotations

import numpy as np
import pytest

from engine.transport.trust import Quarantine, Sampler


@pytest.mark.parametrize("share", [0.0, 0.01, 1 / 3, 0.5, 0.99, 1.0])
def test_the_share_is_kept_over_fetches_of_any_size(share: float) -> None:
    sampler = Sampler(share)
    sizes = [1, 1, 0, 3, 100, 1, 895, 1, 999]
    chosen = [sampler.choose(size) for size in sizes]
    assert [len(c) for c in chosen] == sizes
    assert abs(sum(int(c.sum()) for c in chosen) - share * sum(sizes)) <= 1


def test_what_is_checked_is_spread_evenly() -> None:
    gaps = np.diff(np.flatnonzero(Sampler(0.25).choose(1000)))
    assert set(gaps.tolist()) == {4}


def test_quarantine_after_repeats_for_a_while() -> None:
    now = [0.0]
    quarantine = Quarantine(2, 60.0, lambda: now[0])
    quarantine.damaged("a")
    assert quarantine.objection("a") is None
    now[0] = 10.0
    quarantine.damaged("a")
    assert quarantine.objection("a") == "its last 2 deliveries were damaged, so it is not asked for another 60 s"
    assert quarantine.objection("b") is None
    now[0] = 70.0
    assert quarantine.objection("a") is None
    quarantine.damaged("b")  # what is older than the while is forgotten
    quarantine.damaged("a")
    assert quarantine.objection("a") is None


def test_a_sound_delivery_clears_the_record() -> None:
    quarantine = Quarantine(2, 60.0, lambda: 0.0)
    quarantine.damaged("a")
    quarantine.sound("a")
    quarantine.damaged("a")
    assert quarantine.objection("a") is None
