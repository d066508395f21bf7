"""The kernels of routed experts against plain torch: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from engine.ops.experts import Stack, mix, mix_all
from engine.ops.reference import TorchOps
from engine.routing import Routing

pytest.importorskip("triton")

from engine.ops import grouped
from engine.ops.triton_ops import TritonOps

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HIDDEN, INNER = 64, 48

RULES: dict[str, dict[str, Any]] = {
    "v2-lite": {"scoring": "softmax", "experts": 12, "chosen": 3, "always": 2},
    "v2": {"scoring": "softmax", "experts": 15, "chosen": 2, "groups": 3, "chosen_groups": 2, "scale": 16.0},
    "v3": {
        "scoring": "sigmoid",
        "experts": 16,
        "chosen": 4,
        "groups": 4,
        "chosen_groups": 2,
        "normalize": True,
        "scale": 2.5,
        "corrected": True,
        "always": 1,
    },
    "qwen3": {"scoring": "softmax", "experts": 8, "chosen": 2, "normalize": True},
}


def draw(*shape: int, size: float = 1.0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * size


def half(x: Tensor) -> Tensor:
    return x.half().to(DEVICE)


def stacks(experts: int) -> tuple[Stack, Stack]:
    gate_up = half(draw(experts, 2 * INNER, HIDDEN, size=HIDDEN**-0.5))
    return Stack(gate_up), Stack(half(draw(experts, HIDDEN, INNER, size=INNER**-0.5)))


def whole(parts: Tensor) -> Tensor:
    """The sum that `add_rms_norm` makes of parts [T, parts, hidden]."""
    return parts.float().sum(1).to(parts.dtype)


def sets(ids: Tensor, weights: Tensor) -> list[list[tuple[int, float]]]:
    """Each token's choices in the order of the experts; the order of equal ones is not promised."""
    return [sorted(zip(*pair, strict=True)) for pair in zip(ids.tolist(), weights.tolist(), strict=True)]


@pytest.mark.parametrize("tokens", [1, 20])
@pytest.mark.parametrize("name", RULES)
def test_the_same_experts_are_chosen(name: str, tokens: int) -> None:
    rule = Routing(**RULES[name])
    x, router = half(draw(tokens, 2 * HIDDEN)[:, :HIDDEN]), half(draw(rule.experts, HIDDEN))
    bias = draw(rule.experts).to(DEVICE) if rule.corrected else None
    ops = TritonOps()
    for _ in range(2):  # the second finds the counters as it should
        ids, weights = ops.route(x, router, bias, rule)
    want_ids, want = TorchOps().route(x, router, bias, rule)
    assert ids.shape == want_ids.shape == (tokens, rule.taken)
    for got, expected in zip(sets(ids, weights), sets(want_ids, want), strict=True):
        assert [expert for expert, _ in got] == [expert for expert, _ in expected]
        assert [weight for _, weight in got] == pytest.approx([weight for _, weight in expected], rel=2e-3, abs=1e-5)


def test_a_wide_router_is_summed_in_parts() -> None:
    rule = Routing(scoring="softmax", experts=20, chosen=4)
    x, router = half(draw(3, 1024)), half(draw(20, 1024, size=0.1))
    ids, weights = TritonOps().route(x, router, None, rule)
    want_ids, want = TorchOps().route(x, router, None, rule)
    assert ids.tolist() == want_ids.tolist()
    torch.testing.assert_close(weights, want, rtol=2e-3, atol=1e-5)


def test_what_is_no_number_stays_in_its_row() -> None:
    rule = Routing(**RULES["v3"])
    x, router = half(draw(4, HIDDEN)), half(draw(rule.experts, HIDDEN))
    bias = draw(rule.experts).to(DEVICE)
    clean, _ = TritonOps().route(x, router, bias, rule)
    x[1] = float("nan")
    ids, weights = TritonOps().route(x, router, bias, rule)
    assert weights[1, : rule.chosen].isnan().all()
    assert ((ids >= 0) & (ids <= rule.experts)).all()
    assert ids[[0, 2, 3]].tolist() == clean[[0, 2, 3]].tolist()


@pytest.mark.parametrize(("name", "tokens"), [("v3", 1), ("v2-lite", 3), ("v2-lite", 40)])
def test_the_same_sums_come_out(name: str, tokens: int) -> None:
    rule = Routing(**RULES[name])
    x, router = half(draw(tokens, HIDDEN)), half(draw(rule.experts, HIDDEN))
    gate_up, down = stacks(rule.experts + rule.always)
    ops = TritonOps()
    ids, weights = ops.route(x, router, draw(rule.experts).to(DEVICE) if rule.corrected else None, rule)
    got = whole(ops.mix(x, ids, weights, gate_up, down, rule.always))
    want = TorchOps().mix(x.float(), ids, weights, *(Stack(one.values.float()) for one in (gate_up, down)))
    assert got.dtype is x.dtype
    torch.testing.assert_close(got.float(), want, atol=2e-2, rtol=2e-2)
    assert torch.equal(got, whole(ops.mix(x, ids, weights, gate_up, down, rule.always))), "two runs, the same bits"


def scaled(experts: int, rows: int, columns: int) -> Stack:
    """FP8 with a scale for each block of 16 x 16, the last ones cut off."""
    values = (draw(experts, rows, columns) * 8).to(torch.float8_e4m3fn).to(DEVICE)
    scales = torch.rand(experts, -(-rows // 16), -(-columns // 16), generator=torch.Generator().manual_seed(2))
    return Stack(values, (scales * columns**-0.5 / 8).to(DEVICE), 16)


@pytest.mark.parametrize("tokens", [1, 9])
def test_fp8_is_multiplied_as_it_is_stored(tokens: int) -> None:
    rule = Routing(**RULES["qwen3"])
    x, router = half(draw(tokens, HIDDEN)), half(draw(rule.experts, HIDDEN))
    gate_up, down = scaled(rule.experts, 2 * INNER, HIDDEN), scaled(rule.experts, HIDDEN, INNER)
    ids, weights = TritonOps().route(x, router, None, rule)
    got = whole(TritonOps().mix(x, ids, weights, gate_up, down))
    want = TorchOps().mix(x.float(), ids, weights, gate_up, down)
    torch.testing.assert_close(got.float(), want, atol=5e-3, rtol=2e-2)


@pytest.mark.parametrize("tokens", [1, 20])
def test_one_matrix_in_fp8(tokens: int) -> None:
    x, weight = half(draw(tokens, 96)), scaled(1, 70, 96)
    want = x.float() @ weight.dense(0, torch.float32).T
    torch.testing.assert_close(grouped.multiply_scaled(x, weight).float(), want, atol=5e-3, rtol=2e-3)
    gated = grouped.multiply_scaled(x, weight, gated=True).float()
    torch.testing.assert_close(gated, TorchOps().silu_mul(want), atol=1e-2, rtol=1e-2)


def test_experts_of_linear_layers_need_not_wait_for_the_device() -> None:
    """While a graph is captured every expert runs for every token; the sums are the same."""
    rule = Routing(**RULES["v3"])
    x, router = draw(5, HIDDEN), draw(rule.experts, HIDDEN)
    gate_up, down = (Stack(draw(*one.values.shape) * 0.1) for one in stacks(rule.experts + rule.always))
    ids, weights = TorchOps().route(x, router, draw(rule.experts), rule)

    def run(expert: int, states: Tensor) -> Tensor:
        return TorchOps().silu_mul(states @ gate_up.values[expert].T) @ down.values[expert].T

    args = x, ids, weights, len(down.values), run
    torch.testing.assert_close(mix_all(*args), mix(*args))


def test_odd_widths_are_refused() -> None:
    with pytest.raises(ValueError, match="a weight of 24 columns"):
        grouped.multiply_scaled(half(draw(1, 24)), Stack(half(draw(1, 16, 24))))


def test_blocks_hold_every_slot_once_beside_its_like() -> None:
    ids = torch.randint(0, 12, (37, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32).to(DEVICE)
    order = grouped._arrange(ids, 12, 16, 2)
    rows, owners = order.rows.cpu(), order.owners.cpu()
    used = owners >= 0
    assert sorted(slot for slot in rows[used].flatten().tolist() if slot >= 0) == list(range(ids.numel()))
    assert owners[used].tolist() == sorted(owners[used].tolist(), key=lambda expert: (expert + 2) % 12)
    for block, owner in zip(rows[used].tolist(), owners[used].tolist(), strict=True):
        slots = [slot for slot in block if slot >= 0]
        assert slots == sorted(slots)
        assert {ids.flatten()[slot].item() for slot in slots} == {owner}
