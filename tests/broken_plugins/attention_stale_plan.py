"""Keeps the plan of a step for every later one of the same lengths."""

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_a_plan_belongs_to_its_step"


class Backend(ReferenceAttention):
    def plan(self, batch):
        self.plans = getattr(self, "plans", {})
        key = (tuple(batch.query_lens_host), tuple(batch.seq_lens_host), bool(batch.tree_masks))
        return self.plans.setdefault(key, super().plan(batch))


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
