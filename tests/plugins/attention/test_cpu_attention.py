"""The compiled backend through the suite, and what it promises beyond the contract."""

from __future__ import annotations

from engine.ops.kernels import CPU_FEATURES
from engine.device import DeviceProfile
from engine.plugins.attention import cpu
from engine.testing.attention import AttentionConformance


class TestCpuAttention(AttentionConformance):
    (offer,) = cpu.attention_backends()
    module = "engine.plugins.attention.cpu"
    device = DeviceProfile(kind="cpu", name="with BF16", memory_bytes=2**33, cores=2, cpu_features=CPU_FEATURES)
