"""`engine doctor`: the hardware, the versions, and which components can run here. Imports neither torch nor a model."""

from __future__ import annotations

import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING

import click

from engine.server.cli.table import table

if TYPE_CHECKING:
    from engine.device import DeviceProfile
    from engine.registry import Registry

_LIBRARIES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "huggingface-hub", "numpy", "fastapi")
_CPU_EXTENSIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "bf16", "sve")


@click.command(help="Look at this machine and say which components can run on it, and why others can't.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", help="Which device to look at.")
def command(device: str) -> None:
    """Three tables; exit code 3 when the device that was asked for isn't there."""
    from engine.device import detect
    from engine.registry import Registry

    found = detect(device)  # type: ignore[arg-type]
    click.echo(table(("HARDWARE", ""), _hardware(found)) + "\n")
    click.echo(table(("SOFTWARE", ""), _software()) + "\n")
    click.echo(table(("COMPONENT", "NAME", "HERE", "WHY NOT"), _components(Registry.discover(), found)))


def _hardware(device: DeviceProfile) -> Iterator[tuple[str, str]]:
    yield "device", f"{device.count} x {device.name}" if device.kind == "cuda" else device.name
    yield "kind", device.kind
    yield "memory", f"{device.memory_bytes / 2**30:.1f} GiB available"
    yield "host cores", str(device.cores)
    yield "host instructions", ", ".join(f for f in _CPU_EXTENSIONS if f in device.cpu_features) or "none we use"
    if device.compute_capability:
        yield "compute capability", ".".join(map(str, device.compute_capability))


def _software() -> Iterator[tuple[str, str]]:
    yield "engine", metadata.version("engine-llm")
    yield "python", f"{platform.python_version()} on {platform.platform()}"
    for library in _LIBRARIES:
        try:
            yield library, metadata.version(library)
        except metadata.PackageNotFoundError:
            yield library, "not installed"
    built = find_spec("engine.ops._native") is not None
    yield "native CPU kernels", "built" if built else "not built; install again with a C compiler to get them"


def _components(registry: Registry, device: DeviceProfile) -> Iterator[tuple[str, str, str, str]]:
    from engine.capabilities import Needs
    from engine.registry import noun
    from engine.selection import objections
    from engine.specs import POINTS

    needs = Needs(device=device.kind, compute_capability=device.compute_capability)
    for point in POINTS:
        for owned in registry.offers(point.HOOK):
            reasons = objections(owned.offer, device, needs)
            yield noun(point.HOOK), owned.offer.name, "no" if reasons else "yes", "; ".join(reasons)
    for entry in registry.load():
        if entry.reason:
            yield "plugin", entry.name, "no", f"{entry.state}: {entry.reason}"


__all__ = ["command"]
