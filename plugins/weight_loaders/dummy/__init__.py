"""Random weights of the right shapes for a `config.json`: to measure speed and memory without a checkpoint."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.specs.weight_loader import WeightLoader


def build(options: Options) -> WeightLoader:
    """The one loader."""
    from engine.plugins.weight_loaders.dummy.loader import DummyLoader

    return DummyLoader()


@hookimpl
def weight_loaders() -> list[Offer[WeightLoader]]:
    """The loader that makes weights up; it ranks last, so that missing weights are never replaced in silence."""
    return [Offer(name="dummy", summary="random weights for a config.json", build=build, rank=-100)]
