"""Proposes trees without saying that it does."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.speculator import Draft, Speculator

CAUGHT_BY = "test_declared_flags_are_what_it_does"


class Broken(Speculator):
    def propose(self, contexts):
        return [Draft([1, 2], [None, None]) if c.max_tokens >= 2 else Draft() for c in contexts]


@hookimpl
def speculators():
    return [offer(lambda options, *, profile, max_running: Broken())]
