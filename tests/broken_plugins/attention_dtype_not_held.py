"""Claims bfloat16 and answers in float32."""

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_dtypes"
FAILS = {"dtypes:bfloat16"}


class Backend(ReferenceAttention):
    def forward(self, layer, q, k, v, kv, plan):
        out = super().forward(layer, q, k, v, kv, plan)
        return out.float() if self.shape.dtype == "bfloat16" else out


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
