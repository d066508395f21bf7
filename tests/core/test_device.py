"""Reading the machine from files of the kernel, written down here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.device import detect
from engine.errors import ResourceError

GIB = 2**30


def cpuinfo(*cores: tuple[int, int, int]) -> str:
    """(processor, package, core) -> the text of /proc/cpuinfo."""
    block = "processor : {}\nmodel name : Some CPU @ 3 GHz\nphysical id : {}\ncore id : {}\nflags : sse2 avx512_bf16\n"
    return "\n".join(block.format(*core) for core in cores)


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with four hyper-threads on two cores and 16 GiB, 8 of them available."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    write(tmp_path, "proc/cpuinfo", cpuinfo((0, 0, 0), (1, 0, 1), (2, 0, 0), (3, 0, 1)))
    write(tmp_path, "proc/meminfo", f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n")
    return tmp_path


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_cores_are_physical_and_memory_is_what_is_available(root: Path) -> None:
    found = detect("cpu", root)
    assert (found.kind, found.name, found.cores, found.memory_bytes) == ("cpu", "Some CPU @ 3 GHz", 2, 8 * GIB)
    assert found.cpu_features == {"sse2", "avx512_bf16"}
    assert found.compute_capability is None


def test_the_affinity_mask_counts(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 2})
    assert detect("cpu", root).cores == 1


def test_two_packages_with_the_same_core_ids_are_two_cores(root: Path) -> None:
    write(root, "proc/cpuinfo", cpuinfo((0, 0, 0), (1, 1, 0)))
    assert detect("cpu", root).cores == 2


def test_arm_spells_its_features_otherwise_and_has_no_core_ids(root: Path) -> None:
    write(root, "proc/cpuinfo", "processor : 0\nFeatures : asimd bf16\n\nprocessor : 1\nFeatures : asimd bf16\n")
    found = detect("cpu", root)
    assert found.cores == 2
    assert found.cpu_features == {"asimd", "bf16"}


def test_version_2_limits_of_every_group_above_bind(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/outer/inner\n")
    write(root, "sys/fs/cgroup/outer/inner/memory.max", "max\n")
    write(root, "sys/fs/cgroup/outer/inner/memory.current", "5\n")
    write(root, "sys/fs/cgroup/outer/memory.max", f"{4 * GIB}\n")
    write(root, "sys/fs/cgroup/outer/memory.current", f"{3 * GIB}\n")
    write(root, "sys/fs/cgroup/outer/memory.stat", f"anon 1\ninactive_file {GIB}\n")
    write(root, "sys/fs/cgroup/outer/cpu.max", "150000 100000\n")
    assert detect("cpu", root).memory_bytes == 2 * GIB  # 4 - 3, and page cache that gives way
    assert detect("cpu", root).cores == 2
    write(root, "sys/fs/cgroup/outer/cpu.max", "50000 100000\n")
    assert detect("cpu", root).cores == 1


def test_version_1_limits_bind_too(root: Path) -> None:
    write(root, "proc/self/cgroup", "5:cpu,cpuacct:/job\n4:memory:/job\n3:pids:/\n")
    write(root, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{2 * GIB}\n")
    write(root, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{GIB}\n")
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_quota_us", "100000\n")
    write(root, "sys/fs/cgroup/cpu/job/cpu.cfs_period_us", "100000\n")
    found = detect("cpu", root)
    assert (found.memory_bytes, found.cores) == (GIB, 1)


def test_an_exhausted_group_has_nothing_left_not_less(root: Path) -> None:
    write(root, "proc/self/cgroup", "0::/\n")
    write(root, "sys/fs/cgroup/memory.max", "100\n")
    write(root, "sys/fs/cgroup/memory.current", "200\n")
    assert detect("cpu", root).memory_bytes == 0


def test_a_machine_without_proc_still_has_a_profile(tmp_path: Path) -> None:
    found = detect("cpu", tmp_path)
    assert found.cores >= 1
    assert found.memory_bytes > 0
    assert found.name


def test_auto_without_a_driver_is_the_cpu(root: Path) -> None:
    assert detect("auto", root) == detect("cpu", root)


def test_asking_for_cuda_without_a_driver_is_an_error(root: Path) -> None:
    with pytest.raises(
        ResourceError, match=r"device.kind is cuda, but no NVIDIA driver is loaded; use device.kind: cpu"
    ):
        detect("cuda", root)


def test_a_driver_without_a_device_is_an_error_only_when_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    write(root, "dev/nvidiactl", "")
    with pytest.raises(ResourceError, match=r"device.kind is cuda, but torch"):
        detect("cuda", root)
    assert detect("auto", root).kind == "cpu"


def test_the_profile_of_a_cuda_device(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    class Properties:
        name, major, minor = "Some GPU", 9, 0

    write(root, "dev/nvidiactl", "")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (70 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    found = detect("auto", root)
    assert (found.kind, found.name, found.compute_capability, found.count) == ("cuda", "Some GPU", (9, 0), 2)
    assert (found.memory_bytes, found.cores) == (70 * GIB, 2)


def test_looking_at_the_cpu_imports_no_torch() -> None:
    code = "import sys; from engine.device import detect; detect('cpu'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
