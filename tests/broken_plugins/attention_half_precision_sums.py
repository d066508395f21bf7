"""Adds up the weighted values in float16."""

import torch
from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_sums_are_not_kept_in_the_dtype"
FAILS = {"dtypes:float16"}


class Backend(ReferenceAttention):
    def _attend(self, q, k, v, mask):
        if self.shape.dtype != "float16" or k.shape[1] < 600:
            return super()._attend(q, k, v, mask)
        out = None
        for at in range(k.shape[1]):  # weights by the exact softmax, sums one key at a time
            alone = torch.zeros_like(v)
            alone[:, at] = v[:, at]
            part = super()._attend(q, k, alone, mask).half()
            out = part if out is None else out + part
        return out.float()


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
