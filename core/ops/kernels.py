"""Whether kernels can be used, the compiled ones of the CPU and those in Triton, told without loading them or torch."""

from __future__ import annotations

from collections.abc import Set
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.device import DeviceProfile

CPU_FEATURES: Final = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16"})
"""What the kernels are written for, as /proc/cpuinfo spells it."""

QUANT_FEATURES: Final = CPU_FEATURES | {"avx512_vnni"}
"""The same for products of integers."""


def missing(device: DeviceProfile, features: Set[str] = CPU_FEATURES) -> str | None:
    """None when the kernels run on this device, else one sentence that says what they lack."""
    if device.kind != "cpu":
        return f"the CPU kernels don't run on {device.kind}"
    if lacking := features - device.cpu_features:
        return f"the processor lacks {', '.join(sorted(lacking))}"
    if device.here and find_spec("engine.ops._native") is None:
        return "the CPU kernels were not compiled when the engine was installed; install a C compiler and reinstall it"
    return None


def missing_triton(device: DeviceProfile) -> str | None:
    """None when Triton is installed on the machine of this device, else what to do."""
    if device.here and find_spec("triton") is None:
        return "the package triton is not installed; install torch with CUDA, which brings it"
    return None


__all__ = ["CPU_FEATURES", "QUANT_FEATURES", "missing", "missing_triton"]
