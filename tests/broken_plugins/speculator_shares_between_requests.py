"""Drafts what another request of the batch said last."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.speculator import Draft, Speculator

CAUGHT_BY = "test_requests_do_not_see_each_other"


class Broken(Speculator):
    def propose(self, contexts):
        return [Draft(list(contexts[0].tokens[-1:])[: c.max_tokens]) for c in contexts]


@hookimpl
def speculators():
    return [offer(lambda options, *, profile, max_running: Broken())]
