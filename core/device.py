"""The machine as data: what composition may know of the device, without touching it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device (and the host beside it). Made by `engine.device.detect` or written down by hand."""

    kind: str  # "cpu" or "cuda"
    name: str
    memory_bytes: int
    cores: int  # physical host cores this process may use
    cpu_features: frozenset[str] = frozenset()  # names as /proc/cpuinfo spells them
    compute_capability: tuple[int, int] | None = None
    count: int = 1
