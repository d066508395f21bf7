"""Claims the sliding window and lets every query see everything."""

from dataclasses import replace

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_windows_differ_by_layer"
FAILS = {"masks:sliding_window", "masks:tree"}  # a tree within a window is both


class Backend(ReferenceAttention):
    def __init__(self, shape, page_size):
        super().__init__(replace(shape, windows=tuple(None for _ in shape.windows)), page_size)


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
