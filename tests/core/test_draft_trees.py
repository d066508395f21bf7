"""Trees of drafts: what is cut off, who sees whom, and where the KV of an accepted path goes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.kv_memory import cut_pool
from engine.kv_moves import KVMoves
from engine.plugin import KVKind
from engine.plugins.attention.cpu.backend import CpuAttention
from engine.plugins.attention.reference.backend import ReferenceAttention
from engine.specs.attention import AttentionBackend, AttentionShape, KVLayout
from engine.specs.speculator import Draft
from engine.trees import best_chain, children, depths, mask, path, usable

ANY_TREE = st.integers(0, 10).flatmap(
    lambda n: st.tuples(*(st.none() if not i else st.none() | st.integers(-1, i + 1) for i in range(n)))
)


@given(ANY_TREE, st.data(), st.integers(0, 8))
def test_what_is_left_of_any_draft_is_a_tree(parents: tuple[int | None, ...], data: st.DataObject, room: int) -> None:
    tokens = data.draw(st.lists(st.integers(-1, 6), min_size=len(parents), max_size=len(parents)))
    probs = torch.rand(len(tokens), 5)
    draft, fault = usable(Draft(tokens, parents, probs), room, 5)
    assert len(draft.tokens) <= room
    assert draft.probs is not None
    assert len(draft.probs) == len(draft.tokens)
    assert all(0 <= token < 5 for token in draft.tokens)
    shape = [None, *range(len(draft.tokens) - 1)] if draft.parents is None else list(draft.parents)
    assert all(parent is None or parent < node for node, parent in enumerate(shape[: len(draft.tokens)]))
    if draft.parents is not None:
        for siblings in children(draft.parents).values():
            assert len({draft.tokens[node] for node in siblings}) == len(siblings)
        chain = best_chain(draft)
        assert list(chain.tokens) == [draft.tokens[node] for node in _firsts(draft.parents)]
    sound = all(0 <= token < 5 for token in tokens) and all(p is None or 0 <= p < i for i, p in enumerate(parents))
    assert not (sound and fault)


def _firsts(parents: object) -> list[int]:
    below, found, at = children(parents), list[int](), None  # type: ignore[arg-type]
    while nodes := below.get(at):
        at = nodes[0]
        found.append(at)
    return found


def test_a_chain_ends_where_it_is_wrong() -> None:
    draft, fault = usable(Draft([1, 9, 2]), 4, 5)
    assert (list(draft.tokens), draft.parents) == ([1], None)
    assert fault == "token 9 is outside the vocabulary of 5"
    assert usable(Draft([1, 2, 3]), 2, 5) == (Draft([1, 2]), "")
    assert usable(Draft([1, 2], [None]), 2, 5)[1] == "2 tokens have 1 parents"


def test_nodes_see_their_ancestors_and_the_tokens_before() -> None:
    parents = [None, None, 1, 0, 2]
    assert depths(parents) == [0, 0, 1, 1, 2]
    assert path(parents, 4) == [1, 2, 4]
    sees = mask(2, parents)
    assert [row.nonzero()[:, 0].tolist() for row in sees] == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 3],
        [0, 1, 3, 4],
        [0, 1, 2, 5],
        [0, 1, 3, 4, 6],
    ]


def backends() -> dict[str, tuple[AttentionBackend, int]]:
    def shape(dtype: str, kind: KVKind = KVKind.GQA) -> AttentionShape:
        return AttentionShape(
            kind=kind,
            heads=4,
            kv_heads=1 if kind is KVKind.MLA else 2,
            head_dim=16,
            v_head_dim=16,
            scale=1.0,
            windows=(None, None, None),
            softcap=None,
            dtype=dtype,
        )

    return {
        "reference": (ReferenceAttention(shape("float32"), 8), 8),
        "latent rows": (ReferenceAttention(shape("float32", KVKind.MLA), 8), 8),
        "cpu, float32": (CpuAttention(shape("float32"), 32), 32),
        "cpu, bfloat16": (CpuAttention(shape("bfloat16"), 32), 32),
    }


@pytest.mark.parametrize("name", list(backends()))
@pytest.mark.parametrize("together", [True, False], ids=["one run of memory", "layers apart"])
def test_the_kv_of_tokens_moves_in_every_layer_and_nothing_else_does(name: str, together: bool) -> None:
    """Slots are moved by hand, and attention is asked what it sees: a token whose KV moved is seen where it is now."""
    backend, page = backends()[name]
    layout, layers, pages = backend.kv_layout(), 3, 5
    pool = cut_pool(layout, layers, pages, torch.device("cpu"))
    if not together:
        pool = [tuple(part.clone() for part in layer) for layer in pool]
    size = next(iter(pool[0])).element_size()
    for part in (part for layer in pool for part in layer):
        part.copy_((torch.randn(part.shape) * 9).to(part.dtype))
    before = [[part.clone() for part in layer] for layer in pool]
    sources, targets = (
        torch.tensor([page + 3, 2 * page + 1, page + 5]),
        torch.tensor([3, page + 3, 4 * page + page - 1]),
    )
    KVMoves(layout, pool, page).move(sources, targets)
    for now, old in zip(pool, before, strict=True):
        for number, (part, was) in enumerate(zip(now, old, strict=True)):
            rows, were = _by_token(part, layout, number, page), _by_token(was, layout, number, page)
            torch.testing.assert_close(rows[targets], were[sources], rtol=0, atol=0)
            rest = torch.ones(pages * page, dtype=torch.bool)
            rest[targets] = False
            torch.testing.assert_close(rows[rest], were[rest], rtol=0, atol=0)
            assert rows.shape[0] * rows[0].numel() * size == part.nbytes


def _by_token(part: torch.Tensor, layout: KVLayout, number: int, page: int) -> torch.Tensor:
    """[slots, …], from the documented axes."""
    axes = layout.axes[number]
    moved = part.movedim(1 + axes.index("token"), 1)
    if "member" in axes:
        moved = moved.movedim(1 + axes.index("member"), 2).flatten(1, 2)
    assert moved.shape[1] == page
    return moved.flatten(0, 1).clone()


def test_a_layout_that_does_not_say_where_tokens_lie_is_refused() -> None:
    for axes in ((), (("head", "token", "width"),)):
        layout = KVLayout(parts=(("k", (2, 2, 16)),), dtype="float32", axes=axes)
        with pytest.raises(ValueError, match="don't say where a token of a page lies"):
            KVMoves(layout, [], 8)
