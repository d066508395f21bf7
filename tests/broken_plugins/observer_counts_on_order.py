"""Raises at the end of a request whose beginning it did not see."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.observer import Observer, Stage

CAUGHT_BY = "test_lives_with_gaps"


class Strict(Observer):
    def __init__(self):
        self.begun = {}

    def receive(self, events):
        for event in events:
            if event.stage is Stage.QUEUED:
                self.begun[event.request_id] = event.time
            elif event.stage is Stage.FINISHED:
                del self.begun[event.request_id]


@hookimpl
def observers():
    return [offer(lambda options: Strict())]
