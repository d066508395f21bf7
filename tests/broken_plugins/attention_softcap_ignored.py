"""Claims the soft cap and leaves it out."""

from dataclasses import replace

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_softcap"
FAILS = {"flags:softcap"}


class Backend(ReferenceAttention):
    def __init__(self, shape, page_size):
        super().__init__(replace(shape, softcap=None), page_size)


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
