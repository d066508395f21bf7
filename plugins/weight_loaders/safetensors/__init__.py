"""Folders of the Hugging Face layout with safetensors files, memory-mapped."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.specs.weight_loader import WeightLoader


def build(options: Options) -> WeightLoader:
    """The one loader."""
    from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader

    return SafetensorsLoader()


@hookimpl
def weight_loaders() -> list[Offer[WeightLoader]]:
    """The loader of safetensors folders; claims every folder with a config, to say what is missing from it."""
    return [Offer(name="safetensors", summary="Hugging Face folders, memory-mapped", build=build, rank=10)]
