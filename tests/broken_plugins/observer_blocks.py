"""Waits for the end of a request before it returns."""

import threading

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.observer import Observer, Stage

CAUGHT_BY = "test_lives_with_gaps"
SUITE = {"patience": 0.5}


class Blocking(Observer):
    def __init__(self):
        self.ended = threading.Event()

    def receive(self, events):
        if any(event.stage is Stage.FINISHED for event in events):
            self.ended.set()
        elif len(events) > 2:
            self.ended.wait()


@hookimpl
def observers():
    return [offer(lambda options: Blocking())]
