"""Scales scores by 1 / head size instead of by what the model asks for."""

from dataclasses import replace

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_equals_the_oracle"


class Backend(ReferenceAttention):
    def __init__(self, shape, page_size):
        super().__init__(replace(shape, scale=1.0 / shape.head_dim), page_size)


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
