"""Chains and trees of drafts: what the served head proposes is what the differentiable module says, path by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.device import detect
from engine.ops.kernels import QUANT_FEATURES
from engine.ops.reference import TorchOps
from engine.plugins.quantization.none.linear import DenseQuantization
from engine.plugins.speculators.eagle import EagleOptions, TreeOptions
from engine.plugins.speculators.eagle.module import EagleModule, Unrolled
from engine.plugins.speculators.eagle.resident import EagleSpeculator
from engine.sampling_params import SamplingParams
from engine.specs.model import Forward, ModelProfile
from engine.specs.speculator import Checkpoint, DraftBatch, Drafted, ExtendBatch, ResidentPlan, Target
from engine.testing.speculator import PROFILE as TOY

MakeHead = Callable[..., tuple[Path, EagleModule]]

pytestmark = pytest.mark.usefixtures("one_thread")

SLOTS, POSITIONS, VOCAB, HIDDEN = 3, 64, 160, 64


def profile(**more: Any) -> ModelProfile:
    fields = {name: getattr(TOY, name) for name in TOY.__dataclass_fields__}
    return ModelProfile(**(fields | {"layers": 3, "hidden_size": HIDDEN, "vocab_size": VOCAB} | more))


class Dense(Forward):
    """Attention over rows kept by slot and position, with the keys that each item sees spelled out."""

    def __init__(self, kv: Tensor, slots: Tensor, rows: Tensor, seen: Tensor) -> None:
        self._kv, self._slots, self._rows, self._seen = kv, slots, rows, seen  # [2, slots, positions, heads, width]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        assert layer == 0
        assert v is not None
        self._kv[0, self._slots, self._rows], self._kv[1, self._slots, self._rows] = k, v
        group = q.shape[1] // k.shape[1]
        keys, values = (part[self._slots].repeat_interleave(group, 2) for part in self._kv)
        scores = torch.einsum("nhd,nphd->nhp", q, keys) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~self._seen[:, None], -torch.inf).softmax(-1)
        return torch.einsum("nhp,nphd->nhd", weights, values)


@dataclass(slots=True, kw_only=True)
class Drafts(DraftBatch):
    kv: Tensor
    most: int = field(default=0)  # places used

    def step(self, first: int, positions: Tensor, sees: Tensor | None = None) -> Forward:
        count, items = positions.shape
        self.most = max(self.most, first + items)
        slots = self.slots.repeat_interleave(items)
        rows = (self.positions[:, None] + first + torch.arange(items)).flatten()
        seen = torch.arange(POSITIONS) < self.positions[:, None, None].expand(-1, items, 1)
        for request in range(count):
            start = int(self.positions[request])
            own = torch.ones(items, first + items, dtype=torch.bool) if sees is None else sees[request]
            seen[request, :, start : start + first + items] = own
        return Dense(self.kv, slots, rows, seen.flatten(0, 1))


@dataclass(slots=True)
class Bench:
    """A speculator with its target's embedding and a history of true states and tokens for each slot."""

    speculator: EagleSpeculator
    plan: ResidentPlan
    module: EagleModule
    embedding: Tensor
    head: Tensor  # the target's output layer
    kv: Tensor
    tokens: Tensor  # [slots, positions]
    features: Tensor  # [slots, positions, taps, hidden]

    @torch.inference_mode()
    def extend(self, slot: int, start: int, end: int) -> None:
        """The target has computed positions start to end of a slot, and the token at `end` is known."""
        at = torch.arange(start, end)
        seen = torch.arange(POSITIONS) <= at[:, None]
        self.speculator.extend(
            ExtendBatch(
                slots=torch.tensor([slot]),
                counts=[end - start],
                last=torch.tensor([end - start - 1]),
                tokens=self.tokens[slot, start:end],
                next_tokens=self.tokens[slot, start + 1 : end + 1],
                positions=at,
                hidden=self.features[slot, start:end],
                step=Dense(self.kv, torch.full_like(at, slot), at, seen),
            )
        )

    @torch.inference_mode()
    def draft(self, slots: Sequence[int], positions: Sequence[int], rooms: Sequence[int]) -> Drafted:
        at = torch.tensor(positions)
        batch = Drafts(
            slots=torch.tensor(slots),
            tokens=self.tokens[slots, positions],
            positions=at,
            rooms=rooms,
            params=[SamplingParams()] * len(slots),
            seeds=[0] * len(slots),
            kv=self.kv,
        )
        drafted = self.speculator.draft(batch)
        assert batch.most <= self.plan.places
        return drafted

    @torch.inference_mode()
    def logs(self, slot: int, newest: int, path: Sequence[int]) -> Tensor:
        """The module's log-probabilities [draft vocabulary] of what follows `path`, drafted after position `newest`."""
        embeddings = self.embedding[self.tokens[slot, 1 : newest + 1]]
        attend, states = Unrolled(self.module.shape.window), self.module.fuse(self.features[slot, None, :newest])
        for step, token in enumerate([None, *path]):
            if token is not None:
                embeddings = torch.cat((embeddings[1:], self.embedding[token, None]))
            states, out = self.module(embeddings[None], states, torch.arange(newest)[None] + step, attend)
        eagle3 = self.module.shape.generation == "eagle3"
        logits = self.module.logits(out[0, -1]) if eagle3 else out[0, -1] @ self.head.T
        return logits.log_softmax(-1)

    def ids(self) -> Tensor:
        """The target's id of each draft id."""
        every = torch.arange(self.module.shape.draft_vocab)
        return self.module.target_ids(every) if self.module.shape.generation == "eagle3" else every


def checkpoint(folder: Path, trees: bool = True, max_draft: int = 8, **fields: Any) -> Checkpoint:
    def unused(*_: Any) -> Any:
        raise AssertionError("a head asks for no such thing")

    return Checkpoint(
        profile=profile(**fields),
        config={},
        path=folder,
        dtype="float32",
        device=unused,  # type: ignore[arg-type]
        page_size=16,
        max_draft=max_draft,
        trees=trees,
        tokenizer=unused,
        open_model=unused,
        find_linears=unused,
        find=lambda source: Path(source.removeprefix("path:")),
    )


def bench(made: tuple[Path, EagleModule], tree: TreeOptions | None = None, trees: bool = True) -> Bench:
    folder, module = made
    shape = module.shape
    speculator = EagleSpeculator(EagleOptions(head=f"path:{folder}", tree=tree))
    plan = speculator.plan(checkpoint(folder, trees))
    assert plan.kv is not None
    embedding, head = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, HIDDEN)
    speculator.load(
        Target(
            profile=profile(),
            embed=embedding.__getitem__,
            logits=lambda hidden: hidden @ head.T,
            open_weights=lambda: pytest.fail("the target's weights are not read"),
            next_modules=lambda: pytest.fail("the target's own modules are not read"),
            linears=DenseQuantization(torch.float32),
            ops=TorchOps(),
            device=torch.device("cpu"),
            dtype=torch.float32,
            slots=SLOTS,
            max_positions=POSITIONS,
        )
    )
    return Bench(
        speculator,
        plan,
        module,
        embedding,
        head,
        torch.full((2, SLOTS, POSITIONS, plan.kv.kv_heads, plan.kv.head_dim), 1e3),  # what is not stored would show
        torch.randint(VOCAB, (SLOTS, POSITIONS)),
        torch.randn(SLOTS, POSITIONS, shape.taps, HIDDEN),
    )


def fed(made: tuple[Path, EagleModule], tree: TreeOptions | None = None, trees: bool = True) -> Bench:
    """Slot 2 computed up to 9 in one go, slot 0 up to 14 in pieces."""
    it = bench(made, tree, trees)
    it.extend(2, 0, 9)
    for start, end in ((0, 5), (5, 6), (6, 11), (11, 14)):
        it.extend(0, start, end)
    return it


def test_the_chain_is_the_module_s_greedy_chain(make_head: MakeHead) -> None:
    for made in (
        make_head(),
        make_head(fc_norm=True, norm_output=True),
        make_head("eagle"),
        make_head(layer_types=["sliding_attention"], sliding_window=40, norm_before_residual=True),
    ):
        it = fed(made)
        drafted = it.draft([2, 0], [9, 14], [2, 5])
        assert drafted.parents is None
        assert drafted.tokens.shape == (2, 5)
        for row, (slot, newest) in enumerate(((2, 9), (0, 14))):
            path: list[int] = []
            for _ in range(5):
                path.append(int(it.ids()[it.logs(slot, newest, path).argmax()]))
            assert drafted.tokens[row].tolist() == path


def test_what_a_draft_stored_is_gone_after_the_next_true_tokens(make_head: MakeHead) -> None:
    it, other = fed(make_head()), fed(make_head())  # the same, since their random numbers are
    it.draft([0], [14], [5])
    for one in (it, other):
        one.extend(0, 14, 16)
    assert torch.equal(it.draft([0], [16], [4]).tokens, other.draft([0], [16], [4]).tokens)


def grown(it: Bench, slot: int, newest: int, width: int, depth: int, nodes: int) -> list[tuple[int, ...]]:
    """EAGLE-2's tree by the module, one path at a time: the best paths, best first."""

    def children(path: tuple[int, ...], score: float) -> list[tuple[float, tuple[int, ...]]]:
        best = it.logs(slot, newest, path).topk(width)
        return [
            (score + log, (*path, int(it.ids()[i])))
            for i, log in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]

    level = children((), 0.0)
    made = list(level)
    for _ in range(depth - 1):
        level = [child for score, path in level for child in children(path, score)]
        made += level
        level = sorted(level, reverse=True)[:width]
    return [path for _, path in sorted(made, key=lambda node: -node[0])[:nodes]]


def paths(drafted: Drafted, row: int) -> list[tuple[int, ...]]:
    assert drafted.parents is not None
    found: list[tuple[int, ...]] = []
    for token, parent in zip(drafted.tokens[row].tolist(), drafted.parents[row].tolist(), strict=True):
        assert -1 <= parent < len(found)
        found.append((*(found[parent] if parent >= 0 else ()), token))
    return found


@pytest.mark.parametrize(("width", "depth", "nodes"), [(2, 4, 6), (3, 3, 8), (4, 2, 5)])
def test_the_tree_holds_the_likeliest_paths(width: int, depth: int, nodes: int, make_head: MakeHead) -> None:
    it = fed(make_head(fc_norm=True), TreeOptions(top_k=width, depth=depth))
    drafted = it.draft([2, 0], [9, 14], [nodes, nodes - 1])
    for row, (slot, newest) in enumerate(((2, 9), (0, 14))):
        found = paths(drafted, row)
        assert found == grown(it, slot, newest, width, min(depth, nodes), nodes)
        assert len(set(found)) == nodes


def test_one_token_is_drafted_as_a_chain_and_so_is_all_where_trees_cannot_be_verified(make_head: MakeHead) -> None:
    made, tree = make_head(), TreeOptions(top_k=2, depth=3)
    assert fed(made, tree).draft([0], [14], [1]).parents is None
    it = fed(made, tree, trees=False)
    assert it.plan.places == 7
    assert not it.plan.forks
    assert it.draft([0], [14], [6]).parents is None


def test_the_plan_asks_for_what_the_head_is_made_of(make_head: MakeHead) -> None:
    plan = bench(make_head(), TreeOptions(top_k=4, depth=5)).plan
    assert plan.taps.hidden_layers == (1, 2, 3)
    assert not plan.taps.final_hidden
    assert plan.places == 16
    assert plan.forks
    assert plan.kv is not None
    assert (plan.kv.heads, plan.kv.kv_heads, plan.kv.head_dim, plan.kv.windows) == (4, 2, 16, (None,))
    first = bench(make_head("eagle")).plan
    assert first.taps.hidden_layers == ()
    assert first.taps.final_hidden


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"hidden_size": 128}, "made for a model with a hidden size of 64, but this model .Toy. has 128"),
        ({"vocab_size": 151936}, "made for a model with a vocabulary of 160, but this model .Toy. has 151936"),
        ({"layers": 2}, "layers 1, 2, 3 of its target, which has 2 layers"),
    ],
)
def test_a_head_of_another_model_is_refused(fields: dict[str, Any], told: str, make_head: MakeHead) -> None:
    folder, _ = make_head()
    speculator = EagleSpeculator(EagleOptions(head=f"path:{folder}"))
    with pytest.raises(ValueError, match=told):
        speculator.plan(checkpoint(folder, **fields))


@pytest.mark.parametrize(
    ("dtype", "able", "named", "asked"),
    [
        ("bfloat16", True, None, ["int8"]),
        ("bfloat16", False, None, []),
        ("float32", True, None, []),
        ("float32", False, "int4", ["int4"]),
    ],
)
def test_the_head_is_kept_in_8_bits_where_that_is_faster(
    dtype: str, able: bool, named: str | None, asked: list[str], make_head: MakeHead
) -> None:
    folder, _ = make_head()
    processor = replace(detect("cpu"), cpu_features=QUANT_FEATURES if able else frozenset(), here=False)
    found: list[str] = []
    speculator = EagleSpeculator(EagleOptions(head=f"path:{folder}", quantization=named))
    plain = checkpoint(folder)
    speculator.plan(
        replace(plain, dtype=dtype, device=processor, find_linears=lambda name: found.append(name) or DenseQuantization)
    )
    assert found == asked


def test_without_a_head_the_shipped_ones_are_searched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no draft head for this model \(Toy, 3 layers of 64\)"):
        EagleSpeculator(EagleOptions()).plan(checkpoint(tmp_path))
