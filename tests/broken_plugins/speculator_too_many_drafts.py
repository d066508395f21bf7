"""Proposes three tokens whatever there is room for."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.speculator import Draft, Speculator

CAUGHT_BY = "test_drafts_are_valid_on_any_stream"


class Broken(Speculator):
    def propose(self, contexts):
        return [Draft([1, 2, 3]) for _ in contexts]


@hookimpl
def speculators():
    return [offer(lambda options, *, profile, max_running: Broken())]
