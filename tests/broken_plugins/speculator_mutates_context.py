"""Takes the last token off the scheduler's own list."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.speculator import Draft, Speculator

CAUGHT_BY = "test_contexts_are_left_as_they_were"


class Broken(Speculator):
    def propose(self, contexts):
        return [Draft([context.tokens.pop()][: context.max_tokens] if context.tokens else []) for context in contexts]


@hookimpl
def speculators():
    return [offer(lambda options, *, profile, max_running: Broken())]
