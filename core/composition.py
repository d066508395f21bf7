"""The result of composing: every part that was chosen, why, and what was refused. Pure data; nothing is built yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from engine.config.model import EngineConfig
from engine.device import DeviceProfile
from engine.selection import Choice
from engine.specs.model import ModelProfile


class Row(NamedTuple):
    """One candidate for one part."""

    part: str  # a key of `Composition.choices`, or `kv_connectors.0`, `observers.1`
    name: str
    taken: bool
    distribution: str  # of the taken one, else empty
    why: str


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
    choices: Mapping[str, Choice[Any]]
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
        """What was taken for each part, followed by what was refused for it."""
        rows: list[Row] = []
        for part, choice in self.parts():
            rows.append(Row(part, choice.name, True, choice.distribution, choice.why))
            rows += [Row(part, r.name, False, "", "; ".join(r.reasons)) for r in choice.refused]
        return rows

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
            "parts": {part: _as_dict(choice) for part, choice in self.parts()},
        }


def _as_dict(choice: Choice[Any]) -> dict[str, Any]:
    return {
        "name": choice.name,
        "distribution": choice.distribution,
        "why": choice.why,
        "options": choice.options.model_dump(mode="json"),
        "refused": {refusal.name: list(refusal.reasons) for refusal in choice.refused},
    }


__all__ = ["Composition", "Row"]
