"""Fault injection around any executor: what steps sample, how long they take, whether they come back. For tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from engine.faults import When
from engine.hooks import hookimpl
from engine.plugin import Offer, WrapperOptions

if TYPE_CHECKING:
    from engine.runner import Runner
    from engine.specs.executor import Executor


class StepFault(When):
    """One line of the script. An occasion is a step."""

    kind: Literal["nan", "corrupt", "delay", "raise", "kill"] = Field(
        description="nan: the first sampled row counts as not finite; corrupt: another token than the sampled one is "
        "told; delay waits; raise fails the step; kill ends the process."
    )
    seconds: float = Field(0.1, gt=0, description="How long delay waits.")


class FaultyOptions(WrapperOptions):
    """What is wrapped, and what goes wrong with it."""

    faults: list[StepFault] = Field(default_factory=list, description="The script; several may strike at once.")


def build(options: FaultyOptions, *, inner: Executor, make_runner: Callable[[], Runner]) -> Executor:
    """Wrap `inner`, which has made the runner already."""
    from engine.plugins.executors.faulty.executor import FaultyExecutor

    return FaultyExecutor(inner, options.faults)


@hookimpl
def executors() -> list[Offer[Executor]]:
    """The wrapper."""
    return [
        Offer(
            name="faulty",
            summary="another executor with faults injected (NaN logits, wrong tokens, delay, crash), for tests",
            build=build,
            options=FaultyOptions,
            wraps=True,
        )
    ]
