"""Engines whose page sizes differ share KV: every token's rows arrive where the other layout wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.specs.kv_connector import EventKind, KVSchema, Role
from engine.testing.kv_end import End, EndSpec

CONNECTORS = ["local", "tcp"]

Shapes = Callable[[int], tuple[tuple[str, tuple[int, ...]], ...]]

LAYOUTS: dict[str, tuple[Shapes, tuple[tuple[str, ...], ...]]] = {
    "rows": (lambda page: (("k", (page, 2, 6)), ("v", (page, 2, 5))), (("token", "head", "width"),) * 2),
    "heads first": (lambda page: (("k", (2, page, 6)), ("v", (2, page, 5))), (("head", "token", "width"),) * 2),
    "latent": (lambda page: (("latent", (page, 1, 9)),), (("token", "head", "width"),)),
    "lanes": (
        lambda page: (("k", (3, page // 4, 6, 4)), ("v", (3, page // 2, 5, 2))),
        (("head", "token", "width", "lane"), ("head", "token", "width", "pair")),
    ),
}


def schema(layout: str, page: int) -> KVSchema:
    shapes, axes = LAYOUTS[layout]
    return KVSchema(
        weights="toy", layers=2, page_size=page, parts=shapes(page), dtype="bfloat16", num_pages=160 // page, axes=axes
    )


@pytest.fixture
def make() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def make(connector: str, schema: KVSchema, role: Role) -> End:
            spec = EndSpec(
                module=f"engine.plugins.kv_connectors.{connector}",
                offer=connector,
                options="{}",
                role=role,
                schema=schema,
                engine_id=f"engine-{role}",
                seed=7 if role is Role.PRODUCER else 8,
            )
            end = End(spec)
            stack.callback(end.close)
            return end

        yield make


def rows(end: End, pages: list[int]) -> list[Tensor]:
    """Of each part of each layer, the rows of all tokens: [tokens, everything else in order]."""
    found = []
    for layer in end.pool:
        for tensor, axes, (_, shape) in zip(layer, end.spec.schema.axes, end.spec.schema.parts, strict=True):
            at = axes.index("token")
            group = end.spec.schema.page_size // shape[at]
            picked = tensor[pages].movedim(at + 1, 1)  # [pages, tokens / group, ...]
            if group > 1:
                picked = picked.movedim(-1, 2)
            found.append(picked.reshape(len(pages) * end.spec.schema.page_size, -1))
    return found


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("layout", sorted(LAYOUTS))
@pytest.mark.parametrize(("theirs", "ours"), [(16, 16), (16, 4), (4, 16), (8, 12), (12, 8)])
def test_tokens_arrive_in_pages_of_another_size(
    make: Callable[..., End], connector: str, layout: str, theirs: int, ours: int
) -> None:
    """Whole prompts and rests from a later page on; 44 tokens end in the middle of a page on one side."""
    producer = make(connector, schema(layout, theirs), Role.PRODUCER)
    consumer = make(connector, schema(layout, ours), Role.CONSUMER)
    source, target = scattered(44, theirs, 3), scattered(44, ours, 5)
    handle = producer.connector.publish("r", source, 44, 60.0)
    for first in (0, len(target) // 2):
        consumer.scribble(range(160 // ours), 0)
        consumer.fetch(f"f{first}", handle, target[first:], first)
        assert consumer.fetched(f"f{first}").kind is EventKind.FETCHED
        for sent, got in zip(rows(producer, source), rows(consumer, target), strict=True):
            assert torch.equal(sent[first * ours : 44].view(torch.int16), got[first * ours : 44].view(torch.int16))
        others = [page for page in range(160 // ours) if page not in target[first:]]
        assert not any(tensor[others].view(torch.uint8).any() for layer in consumer.pool for tensor in layer)


def scattered(tokens: int, page: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = torch.randperm(160 // page, generator=generator).tolist()
    return order[: -(-tokens // page)]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_damage_in_a_part_of_a_page_is_noticed(make: Callable[..., End], connector: str) -> None:
    """The producer's digests are those of its pages: what changed since is found before other blocks are digested."""
    producer = make(connector, schema("rows", 16), Role.PRODUCER)
    consumer = make(connector, schema("rows", 4), Role.CONSUMER)
    handle = producer.publish("r", [1, 2])
    consumer.fetch("good", handle, [0, 1, 2, 3, 4, 5, 6, 7])
    assert consumer.fetched("good").kind is EventKind.FETCHED
    producer.pool[1][1].view(torch.uint8)[2, 9] ^= 4
    consumer.fetch("bad", handle, [0, 1, 2, 3, 4, 5, 6, 7])
    failure = consumer.fetched("bad")
    assert failure.kind is EventKind.FETCH_FAILED
    assert "the published pages have changed" in failure.reason


@pytest.mark.parametrize(
    ("layout", "theirs", "ours", "change", "sentence"),
    [
        ("rows", 8, 16, {"axes": ()}, "page_size is 8 there and 16 here"),
        ("lanes", 12, 8, {"axes": (("head", "token", "width", "width2"),) * 2}, "axes is"),
        ("lanes", 12, 16, {"parts": (("k", (3, 1, 6, 12)), ("v", (3, 6, 5, 2)))}, "page_size is 12 there and 16 here"),
        ("rows", 8, 16, {"parts": (("k", (8, 2, 7)), ("v", (8, 2, 5)))}, "parts is"),
        ("rows", 8, 16, {"parts": (("k", (6, 2, 6)), ("v", (8, 2, 5)))}, "parts is"),
        ("rows", 8, 16, {"axes": (("token",), ("token",))}, "axes is"),
    ],
)
def test_what_does_not_convert_is_refused(
    make: Callable[..., End], layout: str, theirs: int, ours: int, change: dict[str, Any], sentence: str
) -> None:
    consumer = make("tcp", schema(layout, ours), Role.CONSUMER)
    producer = make("tcp", schema(layout, theirs), Role.PRODUCER)
    handle = producer.publish("r", [0])
    foreign = replace(schema(layout, theirs), **change)
    handle["schema"] |= {"axes": [list(a) for a in foreign.axes], "parts": [[n, list(s)] for n, s in foreign.parts]}
    with pytest.raises(ValueError, match=sentence):
        consumer.fetch("r", handle, [0])
