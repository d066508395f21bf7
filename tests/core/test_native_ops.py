"""The compiled operations against the plain ones, and how they share the machine with torch."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine import ops
from engine.device import DeviceProfile, detect
from engine.ops import kernels
from engine.ops.reference import TorchOps

DEVICE = detect("cpu")
needs_kernels = pytest.mark.skipif(kernels.missing(DEVICE) is not None, reason=str(kernels.missing(DEVICE)))

WIDTHS = [16, 40, 576, 1001]
TOKENS = [1, 3, 200]


@pytest.fixture(params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


def draw(dtype: torch.dtype, *shape: int, size: float = 1.0) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))) * size).to(dtype)


def check(got: Tensor, want: Tensor) -> None:
    """Equal up to a step of the dtype, for a sum in another order may fall to the other side of a rounding."""
    assert got.dtype == want.dtype
    assert got.is_contiguous()
    step = 2**-7 if want.dtype is torch.bfloat16 else 2e-6
    torch.testing.assert_close(got, want, atol=1e-6, rtol=step)


@needs_kernels
class TestNativeOps:
    def test_is_selected(self, dtype: torch.dtype) -> None:
        from engine.ops.native import NativeOps

        assert isinstance(ops.select(DEVICE, dtype), NativeOps)

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_rms_norm(self, dtype: torch.dtype, tokens: int, width: int) -> None:
        x, weight = draw(dtype, tokens, width, size=3.0), draw(dtype, width)
        check(ops.select(DEVICE, dtype).rms_norm(x, weight, 1e-5), TorchOps().rms_norm(x, weight, 1e-5))

    def test_rms_norm_of_heads_in_a_merged_projection(self, dtype: torch.dtype) -> None:
        merged, weight = draw(dtype, 7, 12, 64), draw(dtype, 64)
        for heads in (merged[:, :8], merged[:, 8:10]):
            check(ops.select(DEVICE, dtype).rms_norm(heads, weight, 1e-6), TorchOps().rms_norm(heads, weight, 1e-6))

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_add_rms_norm(self, dtype: torch.dtype, tokens: int, width: int) -> None:
        x, weight = draw(dtype, tokens, width + 3)[:, :width], draw(dtype, width)
        ours, plain = draw(dtype, tokens, width, size=5.0), draw(dtype, tokens, width, size=5.0)
        got = ops.select(DEVICE, dtype).add_rms_norm(x, ours, weight, 1e-5)
        check(got, TorchOps().add_rms_norm(x, plain, weight, 1e-5))
        assert torch.equal(ours, plain)

    @pytest.mark.parametrize(("head_dim", "rotary"), [(64, 64), (80, 80), (128, 32), (16, 16)])
    @pytest.mark.parametrize("tokens", TOKENS)
    def test_rope(self, dtype: torch.dtype, tokens: int, head_dim: int, rotary: int) -> None:
        table = draw(torch.float32, 300, rotary)
        positions = torch.randint(300, (tokens,), generator=torch.Generator().manual_seed(0))
        ours, plain = draw(dtype, tokens, 6, head_dim), draw(dtype, tokens, 6, head_dim)
        ops.select(DEVICE, dtype).rope(ours[:, :4], ours[:, 4:5], positions, table)
        TorchOps().rope(plain[:, :4], plain[:, 4:5], positions, table)
        check(ours, plain)
        assert torch.equal(ours[:, 5], draw(dtype, tokens, 6, head_dim)[:, 5]), "the values were touched"

    @pytest.mark.parametrize("tokens", TOKENS)
    @pytest.mark.parametrize("width", WIDTHS)
    def test_silu_mul(self, dtype: torch.dtype, tokens: int, width: int) -> None:
        x = draw(dtype, tokens, 2 * width, size=20.0)
        check(ops.select(DEVICE, dtype).silu_mul(x), TorchOps().silu_mul(x))

    def test_silu_at_the_ends(self, dtype: torch.dtype) -> None:
        gate = torch.tensor([[-float("inf"), -200.0, -89.0, -1e-30, 0.0, 89.0, 200.0, float("inf"), float("nan")]])
        got = ops.select(DEVICE, dtype).silu_mul(torch.cat((gate, torch.ones_like(gate)), 1).to(dtype))[0]
        assert got[-1].isnan()
        assert got[-2] == float("inf")
        assert got[5:7].tolist() == gate[0, 5:7].to(dtype).tolist()
        assert got[2:5].abs().max() < 1e-30
        assert got[1] == 0.0

    def test_nan_is_not_swallowed(self, dtype: torch.dtype) -> None:
        x = draw(dtype, 3, 64)
        x[1, 5] = float("nan")
        got = ops.select(DEVICE, dtype).rms_norm(x, draw(dtype, 64), 1e-5)
        assert got[1].isnan().all()
        assert got[::2].isfinite().all()

    def test_row_does_not_depend_on_its_batch(self, dtype: torch.dtype) -> None:
        x, weight, native = draw(dtype, 300, 576), draw(dtype, 576), ops.select(DEVICE, dtype)
        assert torch.equal(native.rms_norm(x, weight, 1e-5)[250:251], native.rms_norm(x[250:251], weight, 1e-5))
        assert torch.equal(native.silu_mul(x)[250:251], native.silu_mul(x[250:251]))

    def test_empty_batch(self, dtype: torch.dtype) -> None:
        native = ops.select(DEVICE, dtype)
        assert native.rms_norm(draw(dtype, 0, 64), draw(dtype, 64), 1e-5).shape == (0, 64)
        assert native.silu_mul(draw(dtype, 0, 64)).shape == (0, 32)

    def test_one_openmp_runtime_is_loaded(self) -> None:
        """Two pools of threads that spin on the same cores are slower than none."""
        code = (
            "import torch\n"
            "from engine.ops.native import NativeOps\n"
            "NativeOps().silu_mul(torch.ones(500, 1000)), torch.ones(2000, 2000).sum()\n"
            "print(len({m.split()[-1] for m in open('/proc/self/maps') if 'libgomp' in m or 'libiomp' in m}))"
        )
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "1"

    def test_wrong_arguments_are_refused(self) -> None:
        from engine.ops import _native

        assert _native.features() == ("avx512_bf16",)
        with pytest.raises(TypeError, match="expected 7 arguments, got 2"):
            _native.silu_mul(1, 2)  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="integer"):
            _native.silu_mul("x", 0, 0, 0, 0, True, 1)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="the plan must be bytes of"):
            _native.attention(b"short", *[0] * 15)


class TestSelection:
    bare = DeviceProfile(kind="cpu", name="old", memory_bytes=2**30, cores=1, cpu_features=frozenset({"avx2"}))

    def test_processor_without_the_instructions(self) -> None:
        assert "the processor lacks avx512_bf16" in str(kernels.missing(self.bare))
        assert isinstance(ops.select(self.bare, torch.float32), TorchOps)

    def test_other_device(self) -> None:
        assert kernels.missing(replace(self.bare, kind="cuda")) == "the CPU kernels don't run on cuda"

    def test_extension_was_not_compiled(self, monkeypatch: pytest.MonkeyPatch) -> None:
        full = replace(self.bare, cpu_features=kernels.CPU_FEATURES)
        monkeypatch.setattr(kernels, "find_spec", lambda name: None)
        assert "were not compiled" in str(kernels.missing(full))
        assert isinstance(ops.select(full, torch.bfloat16), TorchOps)

    def test_other_dtype(self) -> None:
        full = replace(self.bare, cpu_features=kernels.CPU_FEATURES)
        assert isinstance(ops.select(full, torch.float16), TorchOps)

    def test_asking_loads_no_torch(self) -> None:
        code = "import sys, engine.ops.kernels as k; print(k.find_spec('engine.ops.native') and 'torch' in sys.modules)"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "False"


@needs_kernels
def test_peaks_are_first_places_of_finite_rows() -> None:
    from engine.ops.native import peaks

    x = draw(torch.float32, 7, 1001)
    x[1, 1000], x[2, 5], x[3, 0] = torch.nan, torch.inf, -torch.inf
    x[4], x[5, [17, 999]] = -2.0, 9.0
    x[6] = -torch.inf
    places, finite = peaks(x, 2)
    assert finite == [True, False, False, False, True, True, False]
    assert [places[row] for row in (0, 2, 3, 4, 5)] == [int(x[0].argmax()), 5, int(x[3].argmax()), 0, 17]
    assert 0 <= places[1] < 1001
    assert peaks(x[:, 3:20], 2)[0][5] == 14
