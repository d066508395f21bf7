"""Wrappers in the conformance kit: built around an installed component, with that one's capabilities."""

from __future__ import annotations

from typing import Any

import pytest

from engine.device import DeviceProfile
from engine.plugin import Offer, WrapperOptions
from engine.registry import Registry
from engine.testing.suites import suite_for
from engine.testing.wrapping import around, inner_offer


class Wrapped:
    """What a wrapper builds here: itself and what it stands around."""

    def __init__(self, inner: Any, context: dict[str, Any]) -> None:
        self.inner, self.context = inner, context


def build(options: WrapperOptions, *, inner: Any, **context: Any) -> Any:
    return Wrapped(inner, context)


class Plugin:
    """A plugin object with one wrapper."""

    def scheduling_policies(self) -> list[Offer[Any]]:
        return [Offer(name="loud", summary="a wrapper", build=build, options=WrapperOptions, wraps=True)]


def test_a_wrapper_is_built_around_what_auto_would_take() -> None:
    suite = suite_for("scheduling_policies", Plugin(), "loud")
    preferred = inner_offer("scheduling_policies")
    built = suite.offer.build(suite.offer.options())
    assert type(built.inner) is type(preferred.build(preferred.options()))
    assert suite.offer.capabilities == preferred.capabilities


def test_both_get_the_arguments_of_the_extension_point() -> None:
    (offer,) = Plugin().scheduling_policies()
    inner: Offer[Any] = Offer(name="plain", summary="", build=lambda options, **context: context)
    built = around(offer, inner).build(WrapperOptions(), num_pages=3)
    assert (built.inner, built.context) == ({"num_pages": 3}, {"num_pages": 3})


def test_no_wrapper_is_wrapped() -> None:
    offers = {owned.offer.name: owned.offer for owned in Registry.discover().offers("attention_backends")}
    assert any(offer.wraps for offer in offers.values()), "there is none to be left out"
    assert not inner_offer("attention_backends").wraps


def test_a_device_that_nothing_runs_on_is_named() -> None:
    nowhere = DeviceProfile(kind="cuda", name="a card that is not here", memory_bytes=1, cores=1)
    with pytest.raises(LookupError, match="none of the installed server_routes could be wrapped on a card"):
        inner_offer("server_routes", nowhere)
