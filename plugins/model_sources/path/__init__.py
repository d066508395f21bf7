"""`path:FILE_OR_FOLDER`: a model that lies on this machine."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.specs.model_source import ModelSource


def build(options: Options) -> ModelSource:
    """The one source."""
    from engine.plugins.model_sources.path.source import PathSource

    return PathSource()


@hookimpl
def model_sources() -> list[Offer[ModelSource]]:
    """The scheme `path`."""
    return [Offer(name="path", summary="a file or folder on this machine", build=build)]
