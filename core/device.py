"""The machine as data: what composition may know of the device, without touching it.

The CPU is read from /proc and the control groups; torch is imported only where there is a CUDA driver to ask.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from engine.errors import ResourceError

_CUDA_DRIVERS = ("dev/nvidiactl", "dev/dxg")  # Linux, and Linux under Windows


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """One device (and the host beside it). Made by `engine.device.detect`, or read from `engine.device_profiles`."""

    kind: str  # "cpu" or "cuda"
    name: str
    memory_bytes: int  # what this process may still take
    cores: int  # physical host cores this process may use
    cpu_features: frozenset[str] = frozenset()  # names as /proc/cpuinfo spells them
    compute_capability: tuple[int, int] | None = None
    count: int = 1
    bandwidth_bytes_per_s: float | None = None  # of the device's memory; None where nobody knows
    flops: Mapping[str, float] = field(default_factory=dict, hash=False)  # per second, by dtype; empty likewise
    here: bool = True  # False: stands for another machine, whose software nobody can ask


def detect(kind: Literal["auto", "cpu", "cuda"] = "auto", root: Path = Path("/")) -> DeviceProfile:
    """The device to run on; `auto` takes a CUDA device when there is one.

    Raises:
        ResourceError: `cuda` was asked for and there is none; the sentence says what is missing.
    """
    host = _host(root)
    if kind == "cpu":
        return host
    objection = None if any((root / driver).exists() for driver in _CUDA_DRIVERS) else "no NVIDIA driver is loaded"
    found = None if objection else _cuda(host)
    if isinstance(found, DeviceProfile):
        return found
    if kind == "cuda":
        raise ResourceError(f"device.kind is cuda, but {objection or found}; use device.kind: cpu, or auto")
    return host


def _cuda(host: DeviceProfile) -> DeviceProfile | str:
    """The first CUDA device, or why there is none."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (is CUDA_VISIBLE_DEVICES empty, or the driver too old?)"
    properties = torch.cuda.get_device_properties(0)
    return DeviceProfile(
        kind="cuda",
        name=properties.name,
        memory_bytes=torch.cuda.mem_get_info(0)[0],
        cores=host.cores,
        cpu_features=host.cpu_features,
        compute_capability=(properties.major, properties.minor),
        count=torch.cuda.device_count(),
    )


def _host(root: Path) -> DeviceProfile:
    allowed = _allowed_cpus()
    blocks = [block for block in _cpuinfo(root) if int(block.get("processor", -1)) in allowed]
    first = blocks[0] if blocks else {}
    return DeviceProfile(
        kind="cpu",
        name=first.get("model name") or platform.processor() or platform.machine(),
        memory_bytes=min(_available_memory(root), *_group_memory(root)),
        cores=min(_physical_cores(blocks) or len(allowed), *_group_cores(root)),
        cpu_features=frozenset((first.get("flags") or first.get("Features") or "").split()),
    )


def _allowed_cpus() -> frozenset[int]:
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def _cpuinfo(root: Path) -> Iterator[dict[str, str]]:
    """One mapping per logical processor; nothing where /proc/cpuinfo doesn't exist."""
    for block in _text(root / "proc/cpuinfo").split("\n\n"):
        pairs = (line.split(":", 1) for line in block.splitlines() if ":" in line)
        if found := {name.strip(): value.strip() for name, value in pairs}:
            yield found


def _physical_cores(blocks: Iterable[dict[str, str]]) -> int:
    """Hyper-threads of one core share its core id; a machine that states none counts its processors."""
    return len({(b.get("physical id"), b.get("core id", b.get("processor"))) for b in blocks})


def _available_memory(root: Path) -> int:
    if found := re.search(r"^MemAvailable:\s*(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE):
        return int(found[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of the control groups that bind this process, from its own up to the root; both versions."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = base / path.lstrip("/")
        yield from [inner, *(p for p in inner.parents if p == base or base in p.parents)]


def _group_memory(root: Path) -> Iterator[int]:
    """Bytes left under each memory limit. Page cache counts as used there, but gives way."""
    yield 2**63
    for group in _groups(root, "memory"):
        for limit_file, usage_file in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit, usage = _text(group / limit_file).strip(), _text(group / usage_file).strip()
            if limit.isdecimal() and usage.isdecimal():
                cache = re.search(r"^(?:total_)?inactive_file (\d+)", _text(group / "memory.stat"), re.MULTILINE)
                yield max(0, int(limit) - int(usage) + (int(cache[1]) if cache else 0))


def _group_cores(root: Path) -> Iterator[int]:
    """Whole cores that each CPU quota leaves, at least one."""
    yield 2**31
    for group in _groups(root, "cpu"):
        quota = _text(group / "cpu.max").split() or [
            _text(group / "cpu.cfs_quota_us").strip(),
            _text(group / "cpu.cfs_period_us").strip(),
        ]
        if len(quota) == 2 and all(part.isdecimal() for part in quota):
            yield max(1, -(-int(quota[0]) // int(quota[1])))


def _text(path: Path) -> str:
    """The text of a file of the kernel, or nothing: each of them is absent somewhere."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


__all__ = ["DeviceProfile", "detect"]
