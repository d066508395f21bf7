"""Products that gate their result in the same pass, against the product and then the gate: equal to the bit."""

from __future__ import annotations

import pytest
import torch

from engine.device import detect
from engine.ops.kernels import QUANT_FEATURES, missing
from engine.specs.quantization import Linear

LACKING = missing(detect("cpu"), QUANT_FEATURES)
pytestmark = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))


def layer(kind: str, rows: int, k: int, bias: torch.Tensor | None) -> Linear:
    weight = torch.randn(rows, k, generator=torch.Generator().manual_seed(rows))
    if kind == "packed":
        from engine.ops.native import PANEL_ROWS, pack_rows
        from engine.plugins.quantization.packed.linear import PackedLinear

        packed = torch.zeros(-(-rows // PANEL_ROWS), k // 2, PANEL_ROWS, 2, dtype=torch.bfloat16)
        pack_rows(weight.bfloat16(), packed, 0, 2)
        return PackedLinear(packed, rows, bias, torch.bfloat16, 2)
    from engine.plugins.quantization.blocks.kernel import make_layers
    from engine.plugins.quantization.blocks.rounding import rounded

    return make_layers(2)(rounded(weight, int(kind)), bias, False)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [64, 192, 200])  # 200: its halves do not end where panels do
@pytest.mark.parametrize("kind", ["packed", "4", "8"])
def test_gated_products_are_products_that_are_gated(kind: str, rows: int, biased: bool) -> None:
    from engine.ops.native import NativeOps

    ops, draw = NativeOps(2), torch.Generator().manual_seed(1)
    linear = layer(kind, rows, 96, torch.randn(rows, generator=draw) if biased else None)
    for tokens in (0, 1, 6, 7, 13, 300):
        x = torch.randn(tokens, 96, generator=draw).bfloat16()
        got = linear.gated(x, ops)
        assert got.shape == (tokens, rows // 2)
        assert torch.equal(got, ops.silu_mul(linear(x)))
