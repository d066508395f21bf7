"""Which components fit which, and which devices: what composing would say, for every pair, without a model.

A cell is computed by the functions that composing refuses by (`engine.fit.clashes`, `engine.selection.objections`), so
there is no second truth. A pair that fits may still be refused for a certain model or configuration (a page size, say).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from engine.capabilities import LIMITS, Needs
from engine.compose import ROLES
from engine.config.components import PLACES
from engine.device import DeviceProfile
from engine.fit import Placed, clashes, declared
from engine.registry import Registry, noun
from engine.selection import objections


class Cell(NamedTuple):
    """One row against one column."""

    row: str
    column: str
    reasons: tuple[str, ...]  # why they don't fit; empty when they do


@dataclass(frozen=True, slots=True)
class Table:
    """Every row against every column."""

    rows: str  # what the rows are: "attention backend"
    columns: str
    cells: tuple[Cell, ...]  # row by row

    @property
    def names(self) -> list[str]:
        """The columns' names in order."""
        return list(dict.fromkeys(cell.column for cell in self.cells))


def tables(
    registry: Registry, devices: Mapping[str, DeviceProfile], device: DeviceProfile | None = None
) -> list[Table]:
    """Components against devices, connectors against roles, and each pair of extension points that have a relation.

    Args:
        devices: the columns of the first table.
        device: where the pairs are to run; any that suits both if unset.

    Pairs of extension points of which every component fits every other, with nothing to compare but where they run,
    are left out.
    """
    parts = {point: placed(registry, point) for point in dict.fromkeys(PLACES.values())}
    everything = [part for several in parts.values() for part in several]
    points = list(parts)
    pairs = [(one, other) for i, one in enumerate(points) for other in points[i + 1 :]]
    return [
        Table("component", "device", tuple(_on_devices(everything, devices))),
        Table(noun("kv_connectors"), "role", tuple(_in_roles(parts["kv_connectors"]))),
        *(table for one, other in pairs if (table := _against(parts[one], parts[other], device))),
    ]


def placed(registry: Registry, point: str) -> list[Placed]:
    """Every usable offer of an extension point but those that wrap: they fit what the one inside them fits."""
    return [Placed(point, owned.offer) for owned in registry.offers(point) if not owned.offer.wraps]


def fit(one: Placed, other: Placed, device: DeviceProfile | None = None) -> tuple[str, ...]:
    """Why two components can't be parts of one engine (on `device`, if given); empty when they can."""
    alone = [f"{part} can't run there: {why}" for part in (one, other) for why in on_device(part.offer, device)]
    return (*alone, *clashes(one, other))


def on_device(offer: Any, device: DeviceProfile | None) -> list[str]:
    """Why an offer can't run on a device; empty when it can, or when no device is given."""
    if device is None:
        return []
    return objections(offer, device, Needs(device=device.kind, compute_capability=device.compute_capability))


def _on_devices(parts: Iterable[Placed], devices: Mapping[str, DeviceProfile]) -> Iterator[Cell]:
    for part in parts:
        for name, device in devices.items():
            row = f"{noun(part.point)} {part.offer.name}"
            yield Cell(row, name, tuple(on_device(part.offer, device)))


def _in_roles(connectors: Iterable[Placed]) -> Iterator[Cell]:
    for part in connectors:
        for role, flags in ROLES.items():
            missing = sorted(flags - part.offer.capabilities.flags)
            yield Cell(part.offer.name, role, tuple(f"lacks {flag}" for flag in missing))


def _against(ones: Sequence[Placed], others: Sequence[Placed], device: DeviceProfile | None) -> Table | None:
    cells = tuple(Cell(a.offer.name, b.offer.name, fit(a, b, device)) for a in ones for b in others)
    if not any(related(a, b) for a in ones for b in others):
        return None
    return Table(noun(ones[0].point), noun(others[0].point), cells)


def related(one: Placed, other: Placed) -> bool:
    """Whether more than where they run is compared between two components, or whether they clash."""
    shared = any(
        getattr(declared(one.offer), limit) and getattr(declared(other.offer), limit)
        for limit in LIMITS
        if limit != "devices"
    )
    required = one.point in other.offer.requires or other.point in one.offer.requires
    return shared or required or bool(clashes(one, other))


__all__ = ["Cell", "Table", "fit", "on_device", "placed", "related", "tables"]
