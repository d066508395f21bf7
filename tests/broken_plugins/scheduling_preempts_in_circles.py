"""Always sacrifices somebody else, so that two requests take each other's pages in turn."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.specs.scheduling import SchedulingPolicy

CAUGHT_BY = "test_preemption_comes_to_an_end"


class Policy(SchedulingPolicy):
    def order(self, waiting, now, cached):
        return sorted(waiting, key=lambda request: request.arrival)

    def victim(self, running, beneficiary):
        return next((request for request in running if request is not beneficiary), beneficiary)


@hookimpl
def scheduling_policies():
    return [offer(lambda options: Policy())]
