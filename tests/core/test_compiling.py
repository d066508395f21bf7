"""Constraints are compiled beside the steps, once each, and a request waits for its own only."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.batch import Admission, Entry
from engine.compiling import Compiling
from engine.constraint import Constraint
from engine.grammars import GrammarLimits, Grammars, token_table
from engine.masking import Masking
from engine.request import Request, Status
from engine.sampling_params import SamplingParams
from engine.specs.grammar import GrammarBackend, Matcher, TokenTable
from engine.specs.speculator import Draft
from engine.structured import Structured
from engine.testing.tokenizer import EOS, byte_tokenizer

TABLE = TokenTable(
    tokens=[bytes([i]) for i in range(128)] + [b"ab", b"c</t>d"], special={}, ends=(63,), encode=lambda text: []
)


class Sequel(Matcher):
    """Allows one token after another, as listed, then an end token."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens, self.at = [*tokens, 63], 0

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask[:] = 0
        token = self.tokens[min(self.at, len(self.tokens) - 1)]
        mask.view(np.uint32)[token // 32] = 1 << token % 32

    def accept(self, token: int) -> bool:
        took = self.at < len(self.tokens) and self.tokens[self.at] == token
        self.at += took
        return took

    def rollback(self, count: int) -> None:
        self.at -= count
        assert self.at >= 0

    def is_terminated(self) -> bool:
        return self.at >= len(self.tokens) - 1

    def fork(self) -> Matcher:
        made = Sequel(self.tokens[:-1])
        made.at = self.at
        return made


class Slow(GrammarBackend):
    """Compiles when it is told to; `bad` can't be compiled, and `broken` breaks it."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.compiled: list[str] = []

    def compile(self, structured: Structured) -> Matcher:
        assert self.go.wait(30)
        self.compiled.append(str(structured.value))
        if structured.value == "bad":
            raise ValueError("it is bad")
        if structured.value == "broken":
            raise KeyError("oops")
        return Sequel(list(str(structured.value).encode()))


@contextmanager
def made(backend: Slow, seconds: float = 100.0, woken: list[int] | None = None) -> Iterator[tuple[Grammars, Compiling]]:
    limits = GrammarLimits(max_size=100, max_depth=3, compile_seconds=seconds)
    wake = (lambda: woken.append(1)) if woken is not None else (lambda: None)
    grammars = Grammars(lambda: TABLE, lambda tokens: backend, limits, wake)
    compiling = Compiling(grammars)
    try:
        yield grammars, compiling
    finally:
        backend.go.set()
        compiling.close()
    assert not [t for t in threading.enumerate() if t.name.startswith(("grammar", "masks"))]


def request(name: str, value: str | None) -> Request:
    structured = None if value is None else Structured("regex", value)
    return Request(
        id=name,
        tokens=[1],
        prompt_len=1,
        params=SamplingParams(structured=structured),
        seed=0,
        max_len=9,
        eos=frozenset({63}),
        arrival=0.0,
    )


def settle(waiting: Sequence[Request]) -> None:
    for one in waiting:
        assert one.constraint is not None
        one.constraint.exception(30)


def test_a_request_waits_for_its_own_constraint_only() -> None:
    backend, woken = Slow(), []
    with made(backend, woken=woken) as (_, compiling):
        held, free = request("held", "a"), request("free", None)
        compiling.start(held, 0.0)
        compiling.start(free, 0.0)
        assert (held.compiling, free.compiling) == (True, False)
        assert compiling.advance(1.0) == []
        assert held.compiling
        backend.go.set()
        settle([held])
        assert compiling.advance(2.0) == []
        assert not held.compiling
        assert woken


def test_what_can_not_be_compiled_is_refused_with_the_reason() -> None:
    backend = Slow()
    with made(backend) as (_, compiling):
        bad, broken = request("bad", "bad"), request("broken", "broken")
        for one in (bad, broken):
            compiling.start(one, 0.0)
        backend.go.set()
        settle([bad, broken])
        reasons = {one.id: reason for one, reason in compiling.advance(1.0)}
        assert reasons["bad"] == "the regex can't be used: it is bad"
        assert "failed with KeyError" in reasons["broken"]
        assert compiling.advance(2.0) == []


def test_a_deadline_passes_and_an_aborted_request_is_forgotten() -> None:
    backend = Slow()
    with made(backend, seconds=5.0) as (_, compiling):
        late, gone = request("late", "a"), request("gone", "b")
        compiling.start(late, 0.0)
        compiling.start(gone, 0.0)
        gone.status = Status.FINISHED
        assert compiling.advance(4.9) == []
        ((who, reason),) = compiling.advance(5.0)
        assert who is late
        assert "in time" in reason
        assert compiling.advance(99.0) == []


def test_equal_constraints_are_compiled_once_and_matchers_are_apart() -> None:
    backend = Slow()
    backend.go.set()
    with made(backend) as (grammars, _):
        one, other = (grammars.matcher(Structured("regex", "ab")) for _ in range(2))
        assert one.accept(ord("a")) == other.accept(ord("a"))
        assert backend.compiled == ["ab"]
        for i in range(300):  # more than are kept
            grammars.matcher(Structured("regex", f"x{i}"))
        grammars.matcher(Structured("regex", "ab"))
        assert backend.compiled.count("ab") == 2


def test_the_vocabulary_is_read_when_it_is_needed_or_before() -> None:
    read: list[int] = []

    def table() -> TokenTable:
        read.append(1)
        return TABLE

    grammars = Grammars(table, lambda _: Slow(), GrammarLimits(max_size=9, max_depth=9, compile_seconds=9.0))
    assert not read
    for _ in range(2):
        grammars.prepare().result()
    grammars.close()
    assert len(read) == 1


def test_limits_are_told_unseen() -> None:
    with made(Slow()) as (grammars, compiling):
        assert grammars.fault(Structured("choice", ("a" * 60, "b" * 50))) is not None
        assert "3 levels" in str(grammars.fault(Structured("json_schema", '{"a": [[[1]]]}')))
        assert compiling.fault(Structured("json_schema", '{"a": [[1]]}')) is None
        assert compiling.fault(Structured("regex", "[[[[[[a]")) is None
        assert compiling.fault(None) is None
    assert "has none" in str(Compiling().fault(Structured("regex", "a")))


def masks(
    constraint: Constraint,
    tokens: Sequence[int],
    first: int,
    drafts: Sequence[int] = (),
    parents: Sequence[int | None] | None = None,
) -> list[int | None]:
    """The one id that each mask allows; None where anything may come, and behind drafts that may not stand."""
    found: list[int | None] = []
    for mask in constraint.masks(np.array(tokens, dtype=np.int64), first, Draft(drafts, parents)):
        ids = None if mask is None else np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        assert ids is None or len(ids) == 1
        found.append(None if ids is None else int(ids[0]))
    return found


def test_masks_follow_drafts_and_forget_them() -> None:
    constraint = Constraint(Sequel([5, 6, 7]), 2, TABLE)
    assert masks(constraint, [1, 1], 2, [5, 6, 7, 63, 9]) == [5, 6, 7, 63, 63, None]
    assert masks(constraint, [1, 1], 2, [5, 9, 7]) == [5, 6, None, None]
    assert masks(constraint, [1, 1, 5], 3) == [6]
    assert masks(constraint, [1, 1, 5, 6, 7, 63], 6) == [63]
    with pytest.raises(ValueError, match="breaks the form"):
        masks(Constraint(Sequel([5]), 0, TABLE), [4], 1)


def test_masks_follow_every_branch_of_a_tree() -> None:
    constraint = Constraint(Sequel([5, 6, 7]), 2, TABLE, after="")
    tokens, parents = [4, 5, 6, 6, 6, 7], [None, None, 0, 1, None, 3]
    assert masks(constraint, [1, 1], 2, tokens, parents) == [5, None, 6, None, 7, None, 63]
    assert masks(constraint, [1, 1, 5], 3) == [6]
    end = list(b"</t>")
    waiting = Constraint(Sequel([5, 6]), 0, TABLE, after="</t>")
    found = masks(waiting, [1, *end[:3]], 4, [2, end[3], 5, 5], [None, None, 1, 0])
    assert found == [None, None, 5, 6, None]
    assert masks(waiting, [1, *end], 5) == [5]


def test_a_constraint_begins_behind_a_text_however_it_comes() -> None:
    end = list(b"</t>")
    for before in ([1, 2, *end], [129], [*b"<</t>"]):
        constraint = Constraint(Sequel([5, 6]), 0, TABLE, after="</t>")
        for at in range(len(before)):
            assert masks(constraint, before, at, before[at : at + 1])[0] is None
        assert masks(constraint, before, len(before), [5, 6]) == [5, 6, 63]
    constraint = Constraint(Sequel([5, 6]), 0, TABLE, after="</t>")
    assert masks(constraint, [1], 1, [*end, 5, 6]) == [None, None, None, None, 5, 6, 63]
    assert masks(constraint, [1, 2], 2, [3]) == [None, None]


class Open(Sequel):
    """Allows one token again and again, or an end."""

    def fill(self, mask: NDArray[np.int32]) -> None:
        mask.view(np.uint32)[:] = 0
        mask.view(np.uint32)[1] |= 1 << 31
        mask.view(np.uint32)[0] |= 1 << self.tokens[0]

    def accept(self, token: int) -> bool:
        return token == self.tokens[0]


def test_end_tokens_are_held_back_while_anything_else_may_come() -> None:
    assert masks(Constraint(Open([5]), 0, TABLE, ignore_eos=True), [], 0) == [5]
    assert masks(Constraint(Sequel([]), 0, TABLE, ignore_eos=True), [], 0) == [63]


class Broken(Sequel):
    def fill(self, mask: NDArray[np.int32]) -> None:
        raise RuntimeError("the library is broken")

    def fork(self) -> Matcher:
        return Broken([])


def test_a_fault_in_a_matcher_harms_its_slot_only() -> None:
    class Mixed(Slow):
        def compile(self, structured: Structured) -> Matcher:
            return Broken([]) if structured.value == "broken" else super().compile(structured)

        def __init__(self) -> None:
            super().__init__()
            self.go.set()

    with made(Mixed()) as (grammars, _):
        masking = Masking(grammars, torch.device("cpu"))
        for slot, value in enumerate(("broken", "\x05", None, "bad")):
            structured = None if value is None else Structured("regex", value)
            params = SamplingParams(structured=structured)
            masking.admit(Admission(slot=slot, tokens=[1], prompt_len=1, params=params, seed=0, stop_ids=()))
        entries = [
            Entry(slot=slot, start=0, count=1, samples=True, first_page=0, new_pages=[slot]) for slot in range(4)
        ]
        masking.begin(entries, np.ones((4, 4), dtype=np.int64))
        found = masking.finish()
        assert "RuntimeError" in found[0].fault
        assert found[1].row(0) is not None
        assert found[1].row(1) is None
        assert 2 not in found
        assert "it is bad" in found[3].fault
        assert masking.finish() == {}


def test_a_large_batch_is_shared_among_threads_and_every_slot_gets_its_own_mask() -> None:
    backend, slots = Slow(), 60
    backend.go.set()
    with made(backend) as (grammars, _):
        masking = Masking(grammars, torch.device("cpu"))
        for slot in range(slots):
            params = SamplingParams(structured=Structured("regex", chr(slot)))
            masking.admit(Admission(slot=slot, tokens=[1], prompt_len=1, params=params, seed=0, stop_ids=()))
        for taken in (range(slots), range(0, slots, 7)):
            entries = [Entry(slot=s, start=0, count=1, samples=True, first_page=0, new_pages=[s]) for s in taken]
            masking.begin(entries, np.ones((slots, 4), dtype=np.int64))
            found = masking.finish()
            for slot in taken:
                row = found[slot].row(0)
                assert row is not None
                assert int(row.view(torch.int32)[slot // 32]) & 0xFFFFFFFF == 1 << slot % 32
            assert sorted(found) == list(taken)


def test_the_table_of_a_tokenizer_covers_the_columns_of_the_model() -> None:
    tokenizer = byte_tokenizer()
    table = token_table(tokenizer, 300, [EOS])
    assert len(table.tokens) == 300
    assert table.words == 10
    assert table.tokens[65] == b"A"
    assert table.tokens[299] == b""
    assert table.special == {"<end>": EOS}
    assert table.encode("hi") == list(b"hi")
    with pytest.raises(ValueError, match="end-of-sequence"):
        token_table(tokenizer, 300, [])
