"""Which draft KV exists: prefix hits, gaps, KV from elsewhere, faults."""

from __future__ import annotations

import numpy as np
import pytest

from engine.batch import Admission, Entry
from engine.resident.stored import Stored
from engine.sampling_params import SamplingParams

PAGE = 4
TABLE = np.array([7, 3, 9, 1, 5, 0, 0], dtype=np.int32)
OTHER = np.array([7, 3, 8, 2, 6, 0, 0], dtype=np.int32)
"""The same first two pages, found in the cache."""


def books(catches_up: bool = False) -> Stored:
    return Stored(slots=2, pages=10, page_size=PAGE, catches_up=catches_up)


def admission(slot: int, cached: int = 0) -> Admission:
    params = SamplingParams(temperature=0.0)
    return Admission(slot=slot, tokens=[1] * 20, prompt_len=20, params=params, seed=0, stop_ids=(), cached=cached)


def entry(slot: int, start: int, count: int) -> Entry:
    return Entry(slot=slot, start=start, count=count, samples=True, first_page=0, new_pages=[])


def follow(stored: Stored, slot: int, start: int, stop: int, table: np.ndarray) -> int:
    """Compute and store what there is to store; returns where that began."""
    begin = stored.begin(entry(slot, start, stop - start), table)
    if begin < stop:
        stored.store(slot, begin, stop, table)
    return begin


def test_a_prompt_in_chunks_is_stored_as_it_comes() -> None:
    stored = books()
    stored.admit(admission(0))
    assert not stored.ready(entry(0, 0, 1))
    assert [follow(stored, 0, start, stop, TABLE) for start, stop in ((0, 6), (6, 7), (7, 12))] == [0, 6, 7]
    assert stored.ready(entry(0, 12, 1))
    assert not stored.ready(entry(0, 13, 1))
    assert stored.first[0] == 0


def test_a_prefix_hit_finds_what_another_request_stored() -> None:
    stored = books()
    stored.admit(admission(0))
    follow(stored, 0, 0, 12, TABLE)
    stored.admit(admission(1, cached=8))
    assert not stored.ready(entry(1, 8, 1)), "nothing of this request's own is stored yet"
    assert follow(stored, 1, 8, 10, OTHER) == 8
    assert stored.first[1] == 0
    assert stored.ready(entry(1, 10, 1))


def test_a_prefix_that_was_computed_without_the_resident_is_not_seen() -> None:
    stored = books()
    stored.admit(admission(0))
    stored.skip(entry(0, 0, 6), TABLE)
    follow(stored, 0, 6, 12, TABLE)
    assert stored.first[0] == 8, "the page that begins without items has none that count"
    stored.admit(admission(1, cached=8))
    follow(stored, 1, 8, 11, OTHER)
    assert stored.first[1] == 8
    assert stored.ready(entry(1, 11, 1))


def test_kv_from_elsewhere_has_no_items_and_neither_have_its_pages_later() -> None:
    stored = books()
    stored.admit(admission(0))
    follow(stored, 0, 0, 12, TABLE)
    stored.admit(admission(0, cached=4))  # the pages hold items of somebody before, and 4 to 13 were fetched
    assert follow(stored, 0, 13, 14, TABLE) == 16
    assert not stored.ready(entry(0, 14, 1))
    assert follow(stored, 0, 14, 18, TABLE) == 16
    assert (stored.first[0], stored.ready(entry(0, 18, 1))) == (16, True)
    stored.admit(admission(1, cached=8))
    follow(stored, 1, 8, 9, TABLE)
    assert stored.first[1] == 8


def test_a_time_without_drafting_leaves_a_gap() -> None:
    stored = books()
    stored.admit(admission(0))
    follow(stored, 0, 0, 5, TABLE)
    stored.skip(entry(0, 5, 1), TABLE)
    assert not stored.ready(entry(0, 6, 1))
    assert follow(stored, 0, 6, 7, TABLE) == 8
    assert follow(stored, 0, 7, 8, TABLE) == 8
    assert not stored.ready(entry(0, 8, 1)), "nothing is stored since"
    assert follow(stored, 0, 8, 9, TABLE) == 8
    assert stored.ready(entry(0, 9, 1))


@pytest.mark.parametrize("cached", [0, 8])
def test_who_needs_only_tokens_fills_gaps_in(cached: int) -> None:
    stored = books(catches_up=True)
    stored.admit(admission(0))
    stored.skip(entry(0, 0, 6), TABLE)
    stored.admit(admission(1, cached=cached))
    assert follow(stored, 1, max(cached, 8), 11, OTHER) == 0
    assert stored.first[1] == 0
    assert stored.ready(entry(1, 11, 1))
    stored.admit(admission(0, cached=8))
    assert follow(stored, 0, 8, 9, TABLE) == 8
