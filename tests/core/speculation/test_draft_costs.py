"""Curves learn what they are shown, and step costs say what drafts add."""

from __future__ import annotations

import random

import pytest

from engine.speculation.cost import StepCosts
from engine.speculation.curve import Curve


def test_a_curve_knows_nothing_at_first() -> None:
    curve = Curve()
    assert curve.at(3) is None
    assert (curve.reach, curve.samples(3)) == (0, 0)


def test_a_curve_finds_a_bent_line_through_noise() -> None:
    rng, curve = random.Random(0), Curve()
    for _ in range(6000):
        x = rng.randrange(1, 65)
        curve.learn(x, (2.0 + max(0.0, x - 16) / 16) * rng.gauss(1.0, 0.1))
    for x in (1, 5, 16, 24, 40, 64):
        assert curve.at(x) == pytest.approx(2.0 + max(0.0, x - 16) / 16, rel=0.05)


def test_beyond_what_is_known_the_last_value_holds() -> None:
    curve = Curve()
    curve.learn(4, 1.0)
    curve.learn(8, 2.0)
    assert [curve.at(x) for x in (0, 4, 6, 8, 100)] == [1.0, 1.0, 1.5, 2.0, 2.0]
    assert curve.reach == 8


def test_one_hiccup_does_not_move_a_curve_far() -> None:
    curve = Curve()
    for _ in range(30):
        curve.learn(1, 1.0)
    curve.learn(1, 100.0)
    assert curve.at(1) == pytest.approx(1.0, abs=0.03)


def test_a_lasting_change_does() -> None:
    curve = Curve()
    for _ in range(100):
        curve.learn(1, 1.0)
    for _ in range(100):
        curve.learn(1, 3.0)
    assert curve.at(1) == pytest.approx(3.0, rel=0.05)


def measured(rows: int = 4) -> StepCosts:
    costs = StepCosts()
    for _ in range(20):
        costs.learn_plain(rows, 0.01)
    return costs


def test_costs_are_relative_to_plain_steps() -> None:
    costs = measured()
    for _ in range(20):
        costs.learn(4, 4, 1, 0.014, drafting=0.0)
        costs.learn(4, 8, 2, 0.018, drafting=0.0)
    assert costs.ratio(4, 4, 1) == pytest.approx(1.4)
    assert costs.ratio(4, 6, 2) == pytest.approx(1.6)
    assert costs.ratio(4, 0, 0) == 1.0
    assert costs.break_even(4) == pytest.approx(0.4)


def test_drafting_is_told_apart_from_verification() -> None:
    """Four tokens for one request cost four passes of the speculator; one for each of four requests only one."""
    costs = measured()
    for _ in range(20):
        costs.learn(4, 4, 4, 0.014 + 0.008, drafting=0.008)
        costs.learn(4, 4, 1, 0.014 + 0.002, drafting=0.002)
    assert costs.ratio(4, 4, 4) == pytest.approx(2.2)
    assert costs.ratio(4, 4, 1) == pytest.approx(1.6)


def test_what_was_not_tried_is_guessed_on_the_bright_side() -> None:
    costs = measured(8)
    for _ in range(20):
        costs.learn(8, 1, 1, 0.012, drafting=0.0)
    assert costs.ratio(8, 8, 1) == pytest.approx(1.2)  # it may be the waiting that costs
    for _ in range(20):
        costs.learn(8, 8, 1, 0.018, drafting=0.0)
    assert costs.ratio(8, 16, 2) == pytest.approx(2.2)  # it's the tokens, or half of it is


def test_no_cost_is_learned_before_a_plain_step() -> None:
    costs = StepCosts()
    costs.learn(1, 4, 4, 0.02, drafting=0.0)
    assert not costs.knows(1)
    assert costs.reach(1) == 0
