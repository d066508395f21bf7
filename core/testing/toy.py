"""A toy device: no tensors, but real pages, so that every mistake in the bookkeeping of KV shows in the text.

Its memory holds token ids where a real one holds keys and values. The next token is a hash of all tokens read back
through the block table, so a stale page, a wrong slot or a token computed twice gives another text than
`toy_continuation`, which never sees a page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from engine.batch import Admission, Entry, EntryResult, StepBatch, StepResult
from engine.specs.executor import Executor, Pending
from engine.verifier import accept_equal

_EMPTY = -1


def toy_next(history: Sequence[int], vocab_size: int) -> int:
    """The token that the toy model says follows; every earlier token and its place matter."""
    h = 7
    for position, token in enumerate(history):
        h = (h * 1_000_003 + int(token) * (position + 1) + 11) % 2_147_483_647
    return h % vocab_size


def toy_continuation(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """What the toy model writes after a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(toy_next(tokens, vocab_size))
    return tokens[len(prompt) :]


class ToyPending(Pending):
    """Runs late: when asked, or when a later step is launched."""

    def __init__(self, run: Callable[[], StepResult]) -> None:
        self._run = run
        self._outcome: StepResult | Exception | None = None

    def settle(self) -> None:
        """Run, unless that was done; an exception waits for `result`."""
        if self._outcome is None:
            try:
                self._outcome = self._run()
            except Exception as error:
                self._outcome = error

    def result(self) -> StepResult:
        self.settle()
        if isinstance(self._outcome, Exception):
            raise self._outcome
        assert self._outcome is not None, "a settled step has an outcome"
        return self._outcome


class ToyExecutor(Executor):
    """Runs the toy model over `num_pages` pages."""

    def __init__(self, *, num_pages: int, page_size: int, slots: int, vocab_size: int, max_len: int = 4096) -> None:
        self.page_size, self.vocab_size = page_size, vocab_size
        self.memory = np.full((num_pages, page_size), _EMPTY, dtype=np.int64)
        self.tables = np.full((slots, max_len // page_size + 1), _EMPTY, dtype=np.int64)
        self.tokens = np.full((slots, max_len + 1), _EMPTY, dtype=np.int64)
        self.steps = 0
        self.fail_next = False  # make the next step raise
        self._last: ToyPending | None = None

    def launch(self, batch: StepBatch) -> Pending:
        if self._last is not None:
            self._last.settle()  # in order
        self._last = ToyPending(lambda: self._step(batch))
        return self._last

    def close(self) -> None:
        self._last = None

    def _step(self, batch: StepBatch) -> StepResult:
        self.steps += 1
        if self.fail_next:
            self.fail_next = False
            raise RuntimeError("the toy device was told to fail")
        for admission in batch.admissions:
            self._admit(admission)
        return StepResult([self._compute(entry) for entry in batch.entries])

    def _admit(self, admission: Admission) -> None:
        self.tables[admission.slot] = self.tokens[admission.slot] = _EMPTY
        self.tokens[admission.slot, : len(admission.tokens)] = admission.tokens

    def _compute(self, entry: Entry) -> EntryResult:
        table, tokens, end = self.tables[entry.slot], self.tokens[entry.slot], entry.start + entry.count
        table[entry.first_page : entry.first_page + len(entry.new_pages)] = entry.new_pages
        tokens[end - len(entry.drafts) : end] = entry.drafts
        positions = np.arange(entry.start, end)
        assert (tokens[positions] != _EMPTY).all(), "a step computes tokens that do not exist yet"
        self.memory[table[positions // self.page_size], positions % self.page_size] = tokens[positions]
        if not entry.samples:
            return EntryResult()
        before = np.arange(end)
        history = self.memory[table[before // self.page_size], before % self.page_size].tolist()
        first = end - len(entry.drafts)
        sampled = [toy_next(history[:at], self.vocab_size) for at in range(first, end + 1)]
        emitted = accept_equal(sampled, entry.drafts)
        tokens[first : first + len(emitted)] = emitted
        return EntryResult(tokens=emitted, drafted=len(entry.drafts))


__all__ = ["ToyExecutor", "ToyPending", "toy_continuation", "toy_next"]
