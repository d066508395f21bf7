"""The longest cached prefix goes first, however long the others have waited."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.scheduling import SchedulingPolicy

CAUGHT_BY = "test_equals_do_not_starve"


class Policy(SchedulingPolicy):
    def order(self, waiting, now, cached):
        if len(waiting) > 100:
            return sorted(waiting, key=lambda request: request.arrival)
        return sorted(waiting, key=lambda request: -cached(request))

    def victim(self, running, beneficiary):
        return max([*running, beneficiary], key=lambda request: request.arrival)


@hookimpl
def scheduling_policies():
    return [offer(lambda options: Policy())]
