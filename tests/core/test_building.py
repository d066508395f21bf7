"""Building a component: in time, of the right class, and whoever fails is named with its package."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from engine.building import Source, built
from engine.errors import PluginError, ResourceError
from engine.hooks import hookimpl
from engine.plugin import Offer
from engine.registry import Registry
from engine.specs import POINTS
from engine.specs.observer import Observer

ODD = Source("observers", "odd", "acme 1.0", "acme.odd")


class Quiet(Observer):
    """The right class."""

    def receive(self, events: object) -> None:
        raise AssertionError("nothing happens here")


def blame(build: Callable[[], Any], seconds: float = 60.0, point: str = "observers") -> str:
    with pytest.raises(PluginError) as caught:
        built(ODD._replace(point=point), build, seconds)
    said = str(caught.value)
    assert said.startswith(f"'odd' of {point}, offered by acme 1.0 (entry point acme.odd), ")
    assert said.endswith("; name another component in the configuration, or upgrade that package")
    return said


def failing(error: BaseException) -> Callable[[], Any]:
    def build() -> Any:
        raise error

    return build


def test_what_is_built_is_handed_on() -> None:
    quiet = Quiet()
    assert built(ODD, lambda: quiet) is quiet


def test_a_build_that_raises() -> None:
    assert "can't be built: RuntimeError: no such port; " in blame(failing(RuntimeError("no such port")))


def test_a_build_that_ends_the_process() -> None:
    assert "can't be built: SystemExit: 3; " in blame(failing(SystemExit(3)))


def test_a_build_that_names_the_remedy_itself_is_believed() -> None:
    with pytest.raises(ResourceError, match="the disk is full; delete something"):
        built(ODD, failing(ResourceError("the disk is full; delete something")))


def test_a_build_that_hangs() -> None:
    over = threading.Event()
    said = blame(over.wait, seconds=0.05)
    over.set()
    assert "did not come back within 0.05 s from build (plugins.build_seconds)" in said


@pytest.mark.parametrize("made", [None, [], Quiet, object()])
def test_a_build_of_another_type(made: object) -> None:
    assert f"builds a {type(made).__name__}, expected a subclass of Observer" in blame(lambda: made)


@pytest.mark.parametrize("point", ["models", "executors"])
def test_what_reads_weights_may_take_its_time_on_its_callers_thread(point: str) -> None:
    seen: list[int] = []
    assert "builds a NoneType, expected" in blame(lambda: seen.append(threading.get_ident()), 0.0, point)
    assert seen == [threading.get_ident()]


@pytest.mark.parametrize("error", [OSError, ValueError, KeyError])
def test_what_reads_weights_may_blame_the_file(error: type[Exception]) -> None:
    with pytest.raises(error, match="truncated"):
        built(ODD._replace(point="models"), failing(error("lm_head.weight is truncated")))
    assert f"{error.__name__}: " in blame(failing(error("truncated")))
    assert "RuntimeError: out of memory" in blame(failing(RuntimeError("out of memory")), point="models")


def test_an_offer_of_the_registry_is_built_the_same_way() -> None:
    offer: Offer[Any] = Offer(name="odd", summary="", build=lambda options, loud: loud)
    registry = Registry.of({"acme.odd": SimpleNamespace(observers=hookimpl(lambda: [offer]))}, distribution="acme")
    owned = registry.get("observers", "odd")
    quiet = Quiet()
    assert owned.build(offer.options(), loud=quiet) is quiet
    with pytest.raises(PluginError, match=r"'odd' of observers, offered by acme 0 \(entry point acme.odd\), builds a"):
        owned.build(offer.options(), loud=3)


def test_every_extension_point_says_what_its_offers_build() -> None:
    silent = {point.HOOK for point in POINTS if not isinstance(getattr(point, "BUILDS", None), type | tuple)}
    assert silent == {"cli_commands", "server_routes"}  # of libraries that the core doesn't import
