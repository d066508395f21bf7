"""The Triton operations against the plain ones: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.ops.reference import TorchOps

pytest.importorskip("triton")

from engine.ops.triton_ops import TritonOps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter cuts bfloat16 off, unrounded


@pytest.fixture(params=[HALF, torch.float32], ids=["half", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def draw(dtype: torch.dtype, *shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * size).to(DEVICE, dtype)


def check(got: Tensor, want: Tensor) -> None:
    """Equal up to a step of the dtype, for a sum in another order may fall to the other side of a rounding."""
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    step = 2 * torch.finfo(want.dtype).eps if want.dtype.itemsize == 2 else 4e-6
    torch.testing.assert_close(got, want, atol=2e-6, rtol=step)


@pytest.mark.parametrize("width", [16, 40, 576, 1001])
def test_rms_norm(dtype: torch.dtype, width: int) -> None:
    x, weight = draw(dtype, 3, width, size=3.0), draw(dtype, width)
    check(TritonOps().rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_in_a_merged_projection(dtype: torch.dtype) -> None:
    merged, weight = draw(dtype, 7, 12, 64), draw(dtype, 64)
    for heads in (merged[:, :8], merged[:, 8:10]):
        check(TritonOps().rms_norm(heads, weight, 1e-6), TorchOps().rms_norm(heads, weight, 1e-6))


def test_parts_are_summed_before_they_are_added(dtype: torch.dtype) -> None:
    x, weight, ours = draw(dtype, 3, 4, 96), draw(dtype, 96), draw(dtype, 3, 96)
    theirs = ours.clone()
    check(TritonOps().add_rms_norm(x, ours, weight, 1e-5), TorchOps().add_rms_norm(x, theirs, weight, 1e-5))
    check(ours, theirs)


def test_add_rms_norm_adds_to_the_residual(dtype: torch.dtype) -> None:
    x, weight = draw(dtype, 5, 576), draw(dtype, 576)
    ours, theirs = draw(dtype, 5, 577)[:, 1:].contiguous(), draw(dtype, 5, 577)[:, 1:].contiguous()
    check(TritonOps().add_rms_norm(x, ours, weight, 1e-5), TorchOps().add_rms_norm(x, theirs, weight, 1e-5))
    torch.testing.assert_close(ours, theirs, atol=0, rtol=0)


@pytest.mark.parametrize(("heads", "kv_heads", "size", "rotary"), [(9, 3, 64, 64), (4, 1, 80, 32), (7, 1, 128, 128)])
def test_rope_rotates_views_of_a_merged_projection(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int, rotary: int
) -> None:
    angles = torch.rand(50, rotary // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), -1).to(DEVICE)
    positions = torch.tensor([0, 49, 7], device=DEVICE)
    merged = [draw(dtype, 3, heads + 2 * kv_heads, size) for _ in range(2)]
    for ops, rows in zip((TritonOps(), TorchOps()), merged, strict=True):
        ops.rope(rows[:, :heads], rows[:, heads : heads + kv_heads], positions, cos_sin)
    check(merged[0], merged[1])
    assert torch.equal(
        merged[0][:, heads + kv_heads :], draw(dtype, 3, heads + 2 * kv_heads, size)[:, heads + kv_heads :]
    )


@pytest.mark.parametrize("width", [48, 1100])
def test_silu_mul(dtype: torch.dtype, width: int) -> None:
    gate_up = draw(dtype, 4, 2 * width, size=4.0)
    check(TritonOps().silu_mul(gate_up), TorchOps().silu_mul(gate_up))
