"""A grid of shapes and batches for attention backends, within what an offer claims.

Each case has one feature in focus (a dtype, a window, the soft cap, …), so that a failure says which claim is wrong;
heads, head size, page size and batch go round through everything that is claimed. The same offer gives the same cases.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, Final

from engine.capabilities import Capabilities, Flag, KVKind, Mask
from engine.specs.attention import AttentionShape
from engine.testing.claims import some

COUNT: Final = 208
"""How many cases there are, whatever is claimed."""

FOCUSED: Final = 20
"""Cases of each feature; the rest are plain."""

HEADS: Final = ((1, 1), (4, 4), (4, 2), (6, 2), (9, 3), (8, 1), (2, 2))  # query heads, KV heads
HEAD_DIMS: Final = (16, 32, 64, 80, 96, 128, 256)
LATENTS: Final = ((96, 64), (576, 512), (80, 64))  # width of a row, of the part that is the value
PAGE_SIZES: Final = (1, 4, 16, 32, 64)
WINDOWS: Final = (1, 3, 16, 40)
LENGTHS: Final = (1, 1, 1, 2, 3, 15, 16, 17, 33, 64, 70)


@dataclass(frozen=True, slots=True)
class Case:
    """One pool, and the steps that are run in it."""

    claim: str
    shape: AttentionShape
    page_size: int
    steps: tuple[dict[str, int], ...]  # new tokens per request

    def __str__(self) -> str:
        shape = self.shape
        lengths = "+".join(str(n) for n in self.steps[0].values())
        return f"{self.claim} {shape.heads}x{shape.kv_heads}x{shape.head_dim} page {self.page_size} {lengths}"


def cases(capabilities: Capabilities, basic: AttentionShape) -> list[Case]:
    """`COUNT` cases; `basic` is a shape that the offer claims, from which all differ in what is not in focus."""
    makers = list(_features(capabilities, basic))
    plain = makers[0]
    chosen = [maker for maker in makers[1:] for _ in range(FOCUSED)]
    chosen = [plain] * (COUNT - len(chosen)) + chosen
    pages, batches = cycle(some(capabilities.page_sizes, PAGE_SIZES, most=5, up_to=64)), _batches()
    return [Case(claim, shape(), next(pages), next(batches)) for claim, shape in chosen]


def _features(can: Capabilities, basic: AttentionShape) -> Iterator[tuple[str, Callable[[], AttentionShape]]]:
    """Claim -> maker of shapes; the first is the plain one."""
    kinds = can.kv_kinds or frozenset(KVKind)
    heads, sizes = cycle(HEADS), cycle(some(can.head_dims, HEAD_DIMS, most=7, up_to=256))
    latents = cycle(
        [pair for pair in LATENTS if not can.head_dims or pair[0] in can.head_dims] or [(basic.head_dim, 0)]
    )
    windows = cycle(WINDOWS)

    def gqa(**changes: Any) -> AttentionShape:
        count, kv_heads = next(heads)
        size = next(sizes)
        own: dict[str, Any] = {
            "heads": count,
            "kv_heads": kv_heads,
            "head_dim": size,
            "v_head_dim": size,
            "scale": size**-0.5,
        }
        return replace(basic, **own | changes)

    def mla(**changes: Any) -> AttentionShape:
        (count, _), (row, value) = next(heads), next(latents)
        own: dict[str, Any] = {"heads": count, "kv_heads": 1, "head_dim": row, "v_head_dim": value}
        return replace(basic, **own | {"kind": KVKind.MLA, "scale": 0.1} | changes)

    made = gqa if KVKind.GQA in kinds else mla
    yield f"kv_kinds:{KVKind.GQA if made is gqa else KVKind.MLA}", made
    if KVKind.MLA in kinds and made is gqa:
        yield f"kv_kinds:{KVKind.MLA}", mla
    for dtype in sorted((can.dtypes or {"float32", "float16", "bfloat16"}) - {basic.dtype}):
        yield f"dtypes:{dtype}", lambda dtype=dtype: made(dtype=dtype)  # type: ignore[misc]
    if Mask.SLIDING_WINDOW in can.masks:
        yield f"masks:{Mask.SLIDING_WINDOW}", lambda: made(windows=(next(windows), None))
    if Flag.SOFTCAP in can.flags:
        yield f"flags:{Flag.SOFTCAP}", lambda: made(softcap=3.0, scale=0.5)


def _batches() -> Iterator[tuple[dict[str, int], ...]]:
    """Two steps: some prompts; then decodes of some of them beside chunks, new prompts and single tokens."""
    rng = random.Random(0)
    while True:
        first = {f"r{i}": rng.choice(LENGTHS) for i in range(rng.randint(1, 5))}
        second = {name: rng.choice((1, 1, 1, 2, 19)) for name in first if rng.random() < 0.8}
        yield first, {**second, "new": rng.choice(LENGTHS)}


__all__ = ["COUNT", "Case", "cases"]
