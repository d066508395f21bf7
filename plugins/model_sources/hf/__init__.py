"""`hf:ORG/NAME[@REVISION]`: a repository of the Hugging Face hub, fetched once into its local cache."""

from __future__ import annotations

from importlib.util import find_spec

from engine.hooks import hookimpl
from engine.plugin import DeviceProfile, Offer, Options
from engine.specs.model_source import ModelSource


def build(options: Options) -> ModelSource:
    """The one source."""
    from engine.plugins.model_sources.hf.source import HubSource

    return HubSource()


def available(device: DeviceProfile) -> str | None:
    """Whether the hub's client is installed."""
    return None if not device.here or find_spec("huggingface_hub") else "needs the package huggingface_hub"


@hookimpl
def model_sources() -> list[Offer[ModelSource]]:
    """The scheme `hf`."""
    return [Offer(name="hf", summary="a repository of the Hugging Face hub", build=build, available=available)]
