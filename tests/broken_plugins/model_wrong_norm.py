"""Adds a thousandth to the hidden states before the output layer."""

from dataclasses import replace

from engine.hooks import hookimpl
from engine.plugins.models import llama

CAUGHT_BY = "test_logits_equal_transformers"


def build(options, **context):
    model = llama.models()[0].build(options, **context)
    forward = model.forward
    model.forward = lambda *arguments: forward(*arguments) + 1e-3
    return model


@hookimpl
def models():
    return [replace(llama.models()[0], name="broken", build=build)]
