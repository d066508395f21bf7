"""The executor for one device: a runner on a thread of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.specs.executor import Executor

if TYPE_CHECKING:
    from engine.runner import Runner


def build(options: Options, *, make_runner: Callable[[], Runner]) -> Executor:
    """Make the runner on its thread, and wait until it is made."""
    from engine.plugins.executors.uniproc.executor import UniprocExecutor

    return UniprocExecutor(make_runner)


@hookimpl
def executors() -> list[Offer[Executor]]:
    """One thread, one rank."""
    return [Offer(name="uniproc", summary="One rank, on a thread of the engine core", build=build)]
