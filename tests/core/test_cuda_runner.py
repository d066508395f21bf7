"""The runner of CUDA devices against the plain one: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.batch import Admission, Entry, EntryResult, StepBatch
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionBackend, AttentionBatch, KVLayout
from engine.specs.model import Forward, Model

pytest.importorskip("triton")

from engine.cuda.runner import CudaRunner

VOCAB, PAGE, SLOTS = 64, 4, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Recorder(AttentionBackend):
    """Keeps token ids in the pages, and reads the history of every request back through the block table."""

    def __init__(self) -> None:
        self.memory = torch.full((64 * PAGE,), -1, dtype=torch.int64, device=DEVICE)
        self.shortage = 0  # steps of more tokens than so many run out of memory; 0: none do

    def kv_layout(self) -> KVLayout:
        return KVLayout(parts=(), dtype="float32")

    def plan(self, batch: AttentionBatch) -> AttentionBatch:
        if self.shortage and len(batch.slot_mapping) > self.shortage:
            raise torch.OutOfMemoryError("as a test wants it")
        return batch

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Any) -> Tensor:
        """q are token ids; the answer is a hash of all tokens up to each."""
        self.memory[plan.slot_mapping] = q
        found = []
        for r, (count, length) in enumerate(zip(plan.query_lens_host, plan.seq_lens_host, strict=True)):
            index = torch.arange(int(length), device=DEVICE)
            history = self.memory[plan.block_tables[r].long()[index // PAGE] * PAGE + index % PAGE]
            assert bool((history >= 0).all()), "a page that was never written is read"
            found += [(history[: n + 1] * (index[: n + 1] + 3)).sum() for n in range(int(length - count), int(length))]
        return torch.stack(found)


class HashModel(Model):
    """The next token is the hash of the history; token 13 makes logits that are not finite."""

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        assert len(tokens) == len(positions)
        return torch.nn.functional.one_hot(step.attend(0, tokens, tokens, None) % VOCAB, VOCAB).float()

    def logits(self, hidden: Tensor) -> Tensor:
        logits = hidden * 4 - torch.arange(VOCAB, device=hidden.device) * 0.01  # no two alike
        logits[hidden[:, 13] > 0] = torch.nan
        return logits

    def weight_bytes(self) -> int:
        return 0


def make(kind: type[Runner], **more: Any) -> tuple[Runner, Recorder]:
    backend = Recorder()
    extra = {"token_budget": 64, "graphs": False} if kind is CudaRunner else {}
    runner = kind(HashModel(), backend, [()], page_size=PAGE, slots=SLOTS, max_len=40, device=DEVICE, **extra, **more)
    return runner, backend


def admission(slot: int, tokens: Sequence[int], **params: Any) -> Admission:
    chosen = SamplingParams(**{"temperature": 0.0, **params})
    return Admission(slot=slot, tokens=list(tokens), prompt_len=len(tokens), params=chosen, seed=5, stop_ids=())


def entry(slot: int, start: int, count: int, *, samples: bool = True, pages: int = 0, **more: Any) -> Entry:
    """Slot s owns the pages 10 s + 1, …; `pages` of them are known already."""
    last = -(-(start + count) // PAGE)
    new = [10 * slot + 1 + page for page in range(pages, last)]
    return Entry(slot=slot, start=start, count=count, samples=samples, first_page=pages, new_pages=new, **more)


def steps(**params: Any) -> list[StepBatch]:
    """Two prefills, one of them in chunks; decodes; a third request; the first slot taken by another."""
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7], [2, 7, 1]]
    return [
        StepBatch(
            number=1,
            admissions=[admission(0, prompts[0], **params), admission(1, prompts[1], **params)],
            entries=[entry(0, 0, 5), entry(1, 0, 4, samples=False)],
        ),
        StepBatch(number=2, admissions=[], entries=[entry(0, 5, 1, pages=2), entry(1, 4, 5, pages=1)]),
        StepBatch(number=3, admissions=[], entries=[entry(0, 6, 1, pages=2), entry(1, 9, 1, pages=3)]),
        StepBatch(
            number=4,
            admissions=[admission(2, prompts[2], **params)],
            entries=[entry(0, 7, 1, pages=2), entry(1, 10, 1, pages=3), entry(2, 0, 3)],
        ),
        StepBatch(
            number=5,
            admissions=[admission(0, [8, 8, 1, 2, 3, 4], **params)],
            entries=[entry(1, 11, 1, pages=3), entry(2, 3, 1, pages=1), entry(0, 0, 6)],
        ),
        StepBatch(number=6, admissions=[], entries=[entry(1, 12, 1, pages=3), entry(0, 6, 1, pages=2)]),
    ]


def tokens(results: Sequence[EntryResult]) -> list[list[int]]:
    return [result.tokens for result in results]


SAMPLINGS: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"temperature": 1.5}}


@pytest.mark.parametrize("params", SAMPLINGS.values(), ids=SAMPLINGS)
def test_writes_what_the_plain_runner_writes(params: dict[str, Any]) -> None:
    plain, cuda = make(Runner)[0], make(CudaRunner)[0]
    for batch in steps(**params):
        want = plain.step(batch).entries
        got = cuda.launch(batch)().entries
        assert tokens(got) == tokens(want), f"step {batch.number}"
        assert [r.failed for r in got] == [r.failed for r in want]


def test_results_may_be_read_a_step_late() -> None:
    plain, cuda = make(Runner)[0], make(CudaRunner)[0]
    want = [tokens(plain.step(batch).entries) for batch in steps()]
    ahead, got = None, []
    for batch in steps():
        before, ahead = ahead, cuda.launch(batch)
        got += [tokens(before().entries)] if before else []
    assert ahead is not None
    assert [*got, tokens(ahead().entries)] == want


def test_ways_alternate() -> None:
    """A request with log-probabilities makes the host sample while it runs; the others' tokens stay the same."""
    plain, cuda = make(Runner)[0], make(CudaRunner)[0]
    for batch in steps():
        if batch.number == 4:
            batch.admissions[0] = admission(2, batch.admissions[0].tokens, logprobs=2)
        want, got = plain.step(batch).entries, cuda.launch(batch)().entries
        assert tokens(got) == tokens(want), f"step {batch.number}"
        assert [r.logprobs is None for r in got] == [r.logprobs is None for r in want]


def test_a_short_device_computes_halves() -> None:
    plain, (cuda, backend) = make(Runner)[0], make(CudaRunner)
    backend.shortage = 2
    for batch in steps():
        assert tokens(cuda.launch(batch)().entries) == tokens(plain.step(batch).entries), f"step {batch.number}"


def test_no_room_for_a_single_token_is_told() -> None:
    cuda, backend = make(CudaRunner)
    cuda.launch(steps()[0])()
    backend.plan = lambda batch: (_ for _ in ()).throw(torch.OutOfMemoryError("none left"))  # type: ignore[method-assign]
    with pytest.raises(Exception, match=r"no memory left for a step of one token; lower kv_cache\.memory"):
        cuda.launch(StepBatch(number=2, admissions=[], entries=[entry(0, 5, 1, pages=2)]))


def test_pages_given_back_and_taken_anew() -> None:
    """After rejected drafts the scheduler sends pages again, perhaps others."""
    cuda, backend = make(CudaRunner)
    cuda.launch(StepBatch(number=1, admissions=[admission(0, range(1, 9))], entries=[entry(0, 0, 8)]))()
    first = Entry(slot=0, start=8, count=1, samples=True, first_page=2, new_pages=[40])
    again = Entry(slot=0, start=8, count=1, samples=True, first_page=2, new_pages=[41])
    one = cuda.launch(StepBatch(number=2, admissions=[], entries=[first]))()
    backend.memory[40 * PAGE :].fill_(-1)
    assert tokens(cuda.launch(StepBatch(number=3, admissions=[], entries=[again]))().entries) == tokens(one.entries)
    assert int(backend.memory[41 * PAGE]) >= 0
    assert int(backend.memory[40 * PAGE]) == -1


def test_warm_up_runs_both_kinds_of_step() -> None:
    cuda, backend = make(CudaRunner)
    cuda.warm_up()
    assert np.count_nonzero(backend.memory.cpu().numpy() >= 0) == PAGE


def test_a_shared_prefix_is_looked_for_where_it_pays() -> None:
    """What a request holds beyond what all share doesn't count, nor do prefixes that are short."""
    backend = Recorder()
    backend.reads_shared_once = True  # type: ignore[misc]
    sizes = {"page_size": 16, "slots": 70, "max_len": 600, "token_budget": 64}
    cuda = CudaRunner(HashModel(), backend, [()], device=DEVICE, graphs=False, **sizes)  # type: ignore[arg-type]
    slots = np.arange(70)
    cuda._tables[:, :32] = np.arange(70 * 32).reshape(70, 32)
    cuda._host_pages[:] = 32
    ends = np.full(70, 500)
    assert not cuda._shares(slots, ends)
    cuda._tables[3:68, :17] = cuda._tables[3, :17]  # 64 read 272 keys less
    assert cuda._shares(slots, ends)
    assert not cuda._shares(slots[:60], ends[:60])
    assert not cuda._shares(slots, np.full(70, 200))
    cuda._tables[40, 5] = 9  # one differs before the last shared page: all count from there only
    assert not cuda._shares(slots, ends)


class KeepingModel(HashModel):
    """Drops the rows that nobody samples from."""

    left = 0

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        states = step.keep(super().forward(tokens, positions, step))
        self.left = len(states)
        return states


def test_rows_that_nobody_samples_from_are_dropped() -> None:
    """One row is left of each request of a long step, and the same tokens come out."""
    texts, found = [[i * 7 % 12 for i in range(90)], [3] * 70], []
    for model in (HashModel(), KeepingModel()):
        runner = CudaRunner(
            model, Recorder(), [()], page_size=PAGE, slots=2, max_len=100, device=DEVICE, token_budget=256, graphs=False
        )
        batch = StepBatch(
            number=1,
            admissions=[admission(slot, tokens) for slot, tokens in enumerate(texts)],
            entries=[
                Entry(
                    slot=slot,
                    start=0,
                    count=len(tokens),
                    samples=slot == 1,
                    first_page=0,
                    new_pages=list(range(25 * slot, 25 * slot + 25))[: -(-len(tokens) // PAGE)],
                )
                for slot, tokens in enumerate(texts)
            ],
        )
        found.append([one.tokens for one in runner.step(batch).entries])
    assert isinstance(model, KeepingModel)
    assert model.left == 2
    assert found[0] == found[1]
    assert len(found[0][1]) == 1
