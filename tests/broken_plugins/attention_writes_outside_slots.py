"""Clears the slot after the last one, as a kernel that stores in blocks of two would."""

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_nothing_is_written_but_at_the_slots"


class Backend(ReferenceAttention):
    def forward(self, layer, q, k, v, kv, plan):
        out = super().forward(layer, q, k, v, kv, plan)
        if len(q):
            pages, offsets = plan.slots
            after = int(pages[-1]) * self.page_size + int(offsets[-1]) + 1
            kv[0].flatten(0, 1)[after] = 0.0
        return out


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
