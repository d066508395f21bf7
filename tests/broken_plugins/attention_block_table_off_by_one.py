"""Reads each request's pages from the second on."""

from broken_parts import attention_offer

from engine.hooks import hookimpl
from engine.plugins.attention.reference.backend import ReferenceAttention

CAUGHT_BY = "test_where_pages_lie_changes_nothing"


class Backend(ReferenceAttention):
    def _keys(self, batch, requests, length):
        pages, index = super()._keys(batch, requests, length)
        return batch.block_tables[requests, 1 : pages.shape[1] + 1].long(), index


@hookimpl
def attention_backends():
    return [attention_offer(Backend)]
