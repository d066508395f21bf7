"""How a file keeps its matrices, and the quantization that suits it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from engine.capabilities import Flag, Needs
from engine.config.components import Named
from engine.errors import ResourceError
from engine.plugin import Offer, Options
from engine.selection import Choice, Selector
from engine.specs.quantization import QuantizationOffer


def stored_formats(loader: Choice[Any], path: Path) -> Mapping[str, int]:
    """Weights of the file's matrices by format; empty where the loader doesn't tell.

    Raises:
        ResourceError: the file is malformed.
    """
    try:
        found: Mapping[str, int] = loader.build().formats(path)
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"the model at {path} can't be read by the weight loader {loader.name!r}: {error}"
        ) from error
    return found


def choose_quantization(selector: Selector, component: Named, needs: Needs, stored: Mapping[str, int]) -> Choice[Any]:
    """What is named; else one that rounds no weight further than the file did. Raises as `Selector.choose`."""

    def judge(offer: Offer[Any], options: Options) -> list[str]:
        if component.chosen or not isinstance(offer, QuantizationOffer) or Flag.LOSSLESS in offer.capabilities.flags:
            return []
        others = sorted(stored.keys() - offer.formats.keys())
        if stored and not others:
            return []
        kept = f"keeps matrices as {', '.join(others)}" if others else "keeps no matrix in blocks"
        return [f"the file {kept}, which it would round further"]

    return selector.choose(component, needs, judge=judge, auto_needs=replace(needs, flags=frozenset({Flag.FAITHFUL})))


__all__ = ["choose_quantization", "stored_formats"]
