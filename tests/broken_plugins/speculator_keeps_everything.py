"""Keeps the tokens of requests that are gone."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.speculator import Draft, Speculator

CAUGHT_BY = "test_forget_frees"


class Broken(Speculator):
    def __init__(self):
        self.seen = {}

    def propose(self, contexts):
        for context in contexts:
            self.seen[context.request_id] = [token + 1000 for token in context.tokens]
        return [Draft() for _ in contexts]


@hookimpl
def speculators():
    return [offer(lambda options, *, profile, max_running: Broken())]
