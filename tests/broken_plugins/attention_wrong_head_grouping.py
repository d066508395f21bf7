"""Query head h reads KV head h modulo their number, where neighbours share one."""

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_head_counts"


class Backend(ReferenceAttention):
    def forward(self, layer, q, k, v, kv, plan):
        share = self.shape.heads // self.shape.kv_heads
        mixed = q.unflatten(1, (share, self.shape.kv_heads)).transpose(1, 2).flatten(1, 2)
        out = super().forward(layer, mixed, k, v, kv, plan)
        return out.unflatten(1, (self.shape.kv_heads, share)).transpose(1, 2).flatten(1, 2).contiguous()


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
