"""Ways to cut a text into pieces, for parsers whose result may not depend on them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise


def cuts(text: str, random_cuts: int = 30) -> Iterator[list[str]]:
    """Every cut in two, one piece per character, and random cuts into 3 to 9 pieces (always the same ones)."""
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    yield list(text)
    source = random.Random(text)
    for _ in range(random_cuts if len(text) > 3 else 0):
        yield cut_at(text, source.sample(range(1, len(text)), min(source.randint(2, 8), len(text) - 1)))


def cut_at(text: str, places: list[int]) -> list[str]:
    """The pieces between these places."""
    ends = [0, *sorted(places), len(text)]
    return [text[start:end] for start, end in pairwise(ends)]


__all__ = ["cut_at", "cuts"]
