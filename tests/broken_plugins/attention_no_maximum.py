"""Takes the exponential of a score as it is: large ones overflow."""

import torch
from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_large_scores"
FAILS = {"contract"}


class Backend(ReferenceAttention):
    def _attend(self, q, k, v, mask):
        q = q.reshape(*q.shape[:2], self.shape.kv_heads, -1, q.shape[-1])
        scores = torch.einsum("gnhrd,glhd->ghrnl", q, k) * self.shape.scale
        if self.shape.softcap is not None:
            scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
        weights = scores.masked_fill(~mask[:, None, None], float("-inf")).exp()
        weights = weights / weights.sum(-1, keepdim=True)
        return torch.einsum("ghrnl,glhd->gnhrd", weights, v).flatten(2, 3).flatten(0, 1)


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
