"""`package:NAME[/FILE]`: a model that came with an installed Python package."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.specs.model_source import ModelSource


def build(options: Options) -> ModelSource:
    """The one source."""
    from engine.plugins.model_sources.package.source import PackageSource

    return PackageSource()


@hookimpl
def model_sources() -> list[Offer[ModelSource]]:
    """The scheme `package`."""
    return [Offer(name="package", summary="a file inside an installed Python package", build=build)]
