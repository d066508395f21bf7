"""The draft lengths that are chosen are the best there are."""

from __future__ import annotations

import itertools
import random

from engine.speculation.choice import choose


def flat(tokens: int, depth: int) -> float:
    return 1.05


def dear(tokens: int, depth: int) -> float:
    return 1.0 + 0.5 * tokens


def test_nothing_is_drafted_where_nothing_pays() -> None:
    choice = choose([[0.4, 0.1], [0.3]], 2, dear, 100)
    assert (choice.lengths, choice.gain) == ([0, 0], 1.0)
    assert choose([], 3, flat, 100).lengths == []
    assert choose([[]], 1, flat, 100).lengths == [0]


def test_free_tokens_are_all_taken() -> None:
    assert choose([[0.4, 0.1], [0.3]], 2, flat, 100).lengths == [2, 1]


def test_the_likeliest_go_first() -> None:
    assert choose([[0.9, 0.8, 0.7], [0.5]], 4, lambda n, depth: 1.0 + n / 8, 2).lengths == [2, 0]


def test_equal_requests_are_served_alike() -> None:
    assert choose([[0.5, 0.25]] * 4, 4, flat, 4).lengths == [1, 1, 1, 1]


def test_depth_has_its_price() -> None:
    """A draft of four costs four passes of the draft model, four drafts of one cost one."""
    lengths = choose([[0.9, 0.5, 0.3, 0.1]] * 4, 4, lambda n, depth: 1.0 + 0.02 * n + 0.3 * depth, 16).lengths
    assert lengths == [1, 1, 1, 1]


def test_as_good_as_the_best_of_all() -> None:
    """Against every combination of lengths, for random chances and convex costs."""
    rng = random.Random(3)
    for _ in range(200):
        rows = rng.randrange(1, 4)
        survival = [
            list(itertools.accumulate([rng.random() for _ in range(3)], lambda a, b: a * b)) for _ in range(rows)
        ]
        slope, bend = rng.uniform(0, 0.4), rng.uniform(0, 0.05)

        def ratio(tokens: int, depth: int, slope: float = slope, bend: float = bend) -> float:
            return 1.0 + slope * tokens + bend * tokens * tokens

        def gain(lengths: tuple[int, ...], survival: list[list[float]] = survival, rows: int = rows) -> float:
            worth = sum(sum(chances[:n]) for chances, n in zip(survival, lengths, strict=True))
            return (1 + worth / rows) / ratio(sum(lengths), max(lengths))

        best = max(gain(lengths) for lengths in itertools.product(range(4), repeat=rows))
        choice = choose(survival, rows, ratio, 100)
        assert gain(tuple(choice.lengths)) >= 0.97 * best  # sizes between knots are passed over
        assert abs(choice.gain - gain(tuple(choice.lengths))) < 1e-9
