"""Leaves the youngest of a full queue out of the order."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.scheduling import SchedulingPolicy

CAUGHT_BY = "test_the_order_is_a_permutation"


class Policy(SchedulingPolicy):
    def order(self, waiting, now, cached):
        by_arrival = sorted(waiting, key=lambda request: request.arrival)
        return by_arrival if len(waiting) < 3 else by_arrival[:-1]

    def victim(self, running, beneficiary):
        return max([*running, beneficiary], key=lambda request: request.arrival)


@hookimpl
def scheduling_policies():
    return [offer(lambda options: Policy())]
