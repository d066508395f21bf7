"""Counts positions from the start of each chunk."""

from dataclasses import replace

from engine.hooks import hookimpl
from engine.plugins.models import llama

CAUGHT_BY = "test_chunks_equal_the_whole"


def build(options, **context):
    model = llama.models()[0].build(options, **context)
    forward = model.forward
    model.forward = lambda tokens, positions, step: forward(tokens, positions - positions.min(), step)
    return model


@hookimpl
def models():
    return [replace(llama.models()[0], name="broken", build=build)]
