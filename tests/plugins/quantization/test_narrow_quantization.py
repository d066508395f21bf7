"""The kernel for few rows against plain torch: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.device import detect
from engine.ops.reference import TorchOps
from engine.plugins.quantization import narrow
from engine.testing.quantization import QuantizationConformance

pytest.importorskip("triton")

from engine.plugins.quantization.narrow.kernel import Tiling
from engine.plugins.quantization.narrow.linear import MOST_ROWS, NarrowLinear, Workspace, tiling

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SHAPES = [(200, 256), (96, 2048), (70, 96)]  # one part, several parts of k, a depth of 32


(DECLARED,) = narrow.quantizations()
INTERPRETED = replace(DECLARED.capabilities, devices=frozenset({"cpu"}), dtypes=frozenset({"float16"}))
"""The interpreter knows no bfloat16."""


class TestNarrow(QuantizationConformance):
    offer = DECLARED if torch.cuda.is_available() else replace(DECLARED, capabilities=INTERPRETED)
    module = "engine.plugins.quantization.narrow"
    device = detect()


def draw(*shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * size).half().to(DEVICE)


def layer(n: int, k: int, *, biased: bool = False) -> NarrowLinear:
    return NarrowLinear(draw(n, k, size=k**-0.5), draw(n) if biased else None, Workspace(DEVICE))


def check(got: Tensor, want: Tensor, tolerance: float = 4e-3) -> None:
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("rows", [1, 5, 20, MOST_ROWS, MOST_ROWS + 1])
def test_any_number_of_rows(rows: int) -> None:
    made, x = layer(70, 256, biased=True), draw(rows, 256)
    check(made(x), linear(x, made.dense(), draw(70)))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_product(n: int, k: int, biased: bool) -> None:
    made, x = layer(n, k, biased=biased), draw(3, k + 8)[:, :k]  # rows that are further apart than they are long
    for _ in range(2):  # the second finds the counters as it should
        check(made(x), linear(x, made.dense(), draw(n) if biased else None))


@pytest.mark.parametrize("rows", [5, MOST_ROWS, MOST_ROWS + 1])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_gate_inside(n: int, k: int, rows: int) -> None:
    made, x = layer(n, k, biased=True), draw(rows, k)
    check(made.gated(x, TorchOps()), TorchOps().silu_mul(linear(x, made.dense(), draw(n))), 1e-2)


def test_several_parts_are_what_the_second_shape_has() -> None:
    found = [layer(n, k)._tilings[16] for n, k in SHAPES]
    assert [cut is not None and cut.split > 1 for cut in found] == [False, True, False]
    assert tiling(64, 100, 16, 4) is None


def test_parts_are_added_in_order() -> None:
    """Whoever ends last, the result is the same to the bit."""
    made, x = layer(96, 2048), draw(2, 2048)
    assert all(torch.equal(made(x), made(x)) for _ in range(3))
    whole = layer(96, 2048)
    whole._tilings[16] = replace(made._tilings[16] or Tiling(64, 128, 1, 4, 3), split=1)
    check(whole(x), made(x))
