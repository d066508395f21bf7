"""Where compiled kernels are kept between starts: a folder for each key of what they were compiled with and for.

The key is told at every start. On a miss so is the reason: what differs from the kept folder that is most alike.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

FACTS: Final = "compiled_with.json"

DEFAULT: Final = "~/.cache/engine/kernels"


@dataclass(frozen=True, slots=True)
class KernelCache:
    """One folder of compiled kernels."""

    folder: Path
    key: str
    kernels: int  # that are there already
    miss: str | None  # why there are none

    def told(self) -> str:
        """One line for the log."""
        if self.miss is None:
            return f"compiled kernels: key {self.key}, {self.kernels} in {self.folder}"
        return f"compiled kernels: none for key {self.key}, since {self.miss}; they are made on first use"


def key_of(facts: Mapping[str, str]) -> str:
    """Twelve hexadecimal digits."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]


def open_cache(root: Path, facts: Mapping[str, str]) -> KernelCache:
    """The folder for these facts; it is made if need be.

    Raises:
        OSError: it can't be made or written to.
    """
    key = key_of(facts)
    folder, miss = root / key, None
    kernels = sum(1 for _ in folder.glob("*/*.cubin"))
    if not kernels:
        miss = _reason(root, facts, key)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FACTS).write_text(json.dumps(dict(facts), indent=1, sort_keys=True))
    return KernelCache(folder, key, kernels, miss)


def _reason(root: Path, facts: Mapping[str, str], key: str) -> str:
    kept = [_facts(path) for path in sorted(root.glob(f"*/{FACTS}")) if path.parent.name != key]
    if not kept:
        return f"{root} holds no kernels yet"
    nearest = min(kept, key=lambda other: len(_differing(facts, other)))
    changes = [f"{name} is {facts.get(name)}, not {nearest.get(name)}" for name in _differing(facts, nearest)]
    return ", ".join(changes) or f"those in {root / key} were deleted"


def _facts(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _differing(one: Mapping[str, str], other: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in {*one, *other} if one.get(name) != other.get(name))


def use(folder: str | None) -> None:
    """Let Triton keep its kernels in the cache below a folder, and tell the key. For the device that is here."""
    import torch
    import triton  # type: ignore[import-untyped]

    facts = {
        "triton": str(triton.__version__),
        "CUDA": str(torch.version.cuda),
        "device": torch.cuda.get_device_name(),
        "compute capability": ".".join(map(str, torch.cuda.get_device_capability())),
    }
    root = Path(folder or DEFAULT).expanduser()
    try:
        found = open_cache(root, facts)
    except OSError as error:
        log.warning("compiled kernels are kept where Triton does, since %s can't be used: %s", root, error)
        return
    triton.knobs.cache.dir = str(found.folder)
    log.info("%s", found.told())


__all__ = ["KernelCache", "key_of", "open_cache", "use"]
