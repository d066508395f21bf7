"""Claims pages of 32 tokens and addresses them as pages of 16."""

from dataclasses import replace

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_page_sizes"


class Backend(ReferenceAttention):
    def plan(self, batch):
        plan = super().plan(batch)
        pages, offsets = plan.slots
        return replace(plan, slots=(pages, offsets % 16))


@hookimpl
def attention_backends():
    return [attention_offer(Backend, page_sizes=frozenset({16, 32}))]
