"""Claims tree masks and draws every tree as a chain."""

from dataclasses import replace

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_tree"
FAILS = {"masks:tree", "masks:tree_levels"}


class Backend(ReferenceAttention):
    def plan(self, batch):
        return super().plan(replace(batch, tree_masks=None))


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
