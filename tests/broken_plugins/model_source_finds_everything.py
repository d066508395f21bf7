"""Resolves whatever it is asked for to a path, there or not."""

from pathlib import Path

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.model_source import ModelFiles, ModelSource

CAUGHT_BY = "test_what_is_nowhere_is_named"


class Source(ModelSource):
    def resolve(self, rest, progress):
        return ModelFiles(path=Path(rest).absolute(), name=rest)


@hookimpl
def model_sources():
    return [offer(lambda options: Source())]
