"""The result of composing: every part that was chosen, why, and what was refused. Pure data; nothing is built yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.model import EngineConfig
from engine.costs import Cost, cost
from engine.device import DeviceProfile
from engine.plugin import Offer
from engine.selection import Choice
from engine.specs.model import ModelProfile


class Verdict(StrEnum):
    """What became of a candidate."""

    TAKEN = "taken"
    FITS = "fits"  # and would run, but another one goes first or is named
    REFUSED = "refused"


class Row(NamedTuple):
    """One candidate for one part."""

    part: str  # a key of `Composition.choices`, or `kv_connectors.0`, `observers.1`
    name: str
    verdict: Verdict
    distribution: str  # name and version of the package that offers it
    reasons: tuple[str, ...]
    cost: Cost | None  # None where nothing is expected to be computed, or the device's figures are unknown

    @property
    def why(self) -> str:
        """The reasons as one text."""
        return "; ".join(self.reasons)


@dataclass(frozen=True, slots=True, kw_only=True)
class Composition:
    """An engine on paper.

    `choices` has the keys `loader`, `model`, `attention`, `kv_cache`, `quantization`, `executor` and `scheduler`, and
    `speculator` and `grammar` when there is one. `connectors` and `observers` are in the order of the configuration's
    lists.
    """

    config: EngineConfig
    device: DeviceProfile
    model_path: Path
    model_config: Mapping[str, Any]  # the checkpoint's config.json or its equivalent
    profile: ModelProfile
    dtype: str  # of weights and activations: "float32", "bfloat16" or "float16"
    max_context: int  # tokens a request may have, prompt and output
    page_size: int  # tokens
    choices: Mapping[str, Choice[Any]]
    stored: Mapping[str, int] = field(default_factory=dict)  # weights of the file's matrices, by format
    connectors: tuple[Choice[Any], ...] = ()
    observers: tuple[Choice[Any], ...] = ()

    def parts(self) -> Iterator[tuple[str, Choice[Any]]]:
        """Every choice under the name that people know it by; what one wraps follows as its `.inner`."""
        for part, choice in self._outer():
            yield part, choice
            while choice.inner is not None:
                part, choice = f"{part}.inner", choice.inner
                yield part, choice

    def _outer(self) -> Iterator[tuple[str, Choice[Any]]]:
        yield from self.choices.items()
        yield from ((f"kv_connectors.{i}", choice) for i, choice in enumerate(self.connectors))
        yield from ((f"observers.{i}", choice) for i, choice in enumerate(self.observers))

    def explain(self) -> list[Row]:
        """For each part what was taken, followed by the other candidates."""
        return [row for part, choice in self.parts() for row in self._candidates(part, choice)]

    def _candidates(self, part: str, choice: Choice[Any]) -> Iterator[Row]:
        cost = self._cost(choice.point, choice.offer)
        yield Row(part, choice.name, Verdict.TAKEN, choice.distribution, (choice.why,), cost)
        for other in choice.refused:
            verdict = Verdict.FITS if other.fits else Verdict.REFUSED
            cost = self._cost(choice.point, other.offer) if other.fits else None
            yield Row(part, other.name, verdict, other.distribution, other.reasons, cost)

    def _cost(self, point: str, offer: Offer[Any]) -> Cost | None:
        """Of the component itself: a wrapper costs what it wraps, which has rows of its own."""
        return None if offer.wraps else cost(self, point, offer)

    def as_dict(self) -> dict[str, Any]:
        """The same for logs and for JSON; secrets are masked."""
        device = asdict(self.device)
        del device["cpu_features"]  # a hundred words that nobody reads
        return {
            "model": {
                "path": str(self.model_path),
                "architecture": self.profile.architecture,
                "parameters": self.profile.parameters,
                "layers": self.profile.layers,
                "dtype": self.dtype,
                "max_context": self.max_context,
            },
            "device": device,
            "parts": {part: self._part(part, choice) for part, choice in self.parts()},
        }

    def _part(self, part: str, choice: Choice[Any]) -> dict[str, Any]:
        return {
            "point": choice.point,
            "name": choice.name,
            "distribution": choice.distribution,
            "why": choice.why,
            "options": choice.options.model_dump(mode="json"),
            "candidates": [_as_dict(row) for row in self._candidates(part, choice)],
        }


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "name": row.name,
        "verdict": row.verdict,
        "distribution": row.distribution,
        "reasons": list(row.reasons),
        "cost": asdict(row.cost) if row.cost else None,
    }


__all__ = ["Composition", "Row", "Verdict"]
