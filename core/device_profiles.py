"""Devices as data: a table of known ones beside this module, and the reading of a user's own file of the same form."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.config.model import Bytes
from engine.config.source import read
from engine.device import DeviceProfile
from engine.discovery import nearest
from engine.errors import ConfigError

_TABLE = Path(__file__).with_suffix(".yaml")


_Figure = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Element = Literal["float32", "bfloat16", "float16", "float8", "int8"]


class _Written(BaseModel):
    """One device as YAML states it. `bandwidth` in bytes per second, `flops` per second and element type."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["cpu", "cuda"]
    name: str
    memory: Bytes
    cores: int = Field(16, gt=0)
    cpu_features: frozenset[str] = frozenset()
    compute_capability: tuple[int, int] | None = None
    count: int = Field(1, gt=0)
    bandwidth: _Figure | None = None
    flops: dict[_Element, _Figure] = Field(default_factory=dict)

    def profile(self) -> DeviceProfile:
        """The same as the rest of the engine knows it."""
        return DeviceProfile(
            kind=self.kind,
            name=self.name,
            memory_bytes=self.memory,
            cores=self.cores,
            cpu_features=self.cpu_features,
            compute_capability=self.compute_capability,
            count=self.count,
            bandwidth_bytes_per_s=self.bandwidth,
            flops={str(element): figure for element, figure in self.flops.items()},
            here=False,
        )


def load_profile(name_or_path: str | Path) -> DeviceProfile:
    """A device by its name in the table (`h200`, `cpu`, …), or the one that a YAML file describes.

    Raises:
        ConfigError: there is neither; or the file is malformed, named with each key that is wrong.
    """
    text = str(name_or_path)
    if text in known():
        return known()[text]
    path = Path(text)
    if not path.is_file():
        raise ConfigError(
            f"no device profile is named {text!r} and no such file exists; known: {', '.join(known())}; "
            f"a file of your own has the keys of one of these{nearest(text, known())}"
        )
    return _read(read(path)[0], str(path))


@cache
def known() -> dict[str, DeviceProfile]:
    """Every device of the table by its name, in the table's order."""
    return {name: _read(entry, name) for name, entry in yaml.safe_load(_TABLE.read_text()).items()}


def with_figures(device: DeviceProfile) -> DeviceProfile:
    """A detected device with the bandwidth and FLOP/s of the table's device of that name, if there is one."""
    same = next((other for other in known().values() if other.name == device.name), None)
    if device.bandwidth_bytes_per_s or same is None:
        return device
    return replace(device, bandwidth_bytes_per_s=same.bandwidth_bytes_per_s, flops=same.flops)


def _read(entry: Any, source: str) -> DeviceProfile:
    if not isinstance(entry, dict):
        keys = ", ".join(_Written.model_fields)
        raise ConfigError(f"the device profile {source} is not a mapping; its keys are {keys}")
    try:
        return _Written.model_validate(entry).profile()
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, p['loc']))}: {p['msg']}" for p in error.errors())
        raise ConfigError(
            f"the device profile {source} is malformed: {problems}; its keys are {', '.join(_Written.model_fields)}"
        ) from None


__all__ = ["known", "load_profile", "with_figures"]
