"""Wrappers under test: an offer that stands around another one needs something to stand around.

class TestMine(GrammarConformance):
    offer = around(my_package.grammars()[0], inner_offer("grammars"))
    module = "my_package"
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.device import DeviceProfile
from engine.plugin import Offer, Options
from engine.registry import Registry
from engine.testing.offer import CPU


def inner_offer(hook: str, device: DeviceProfile = CPU) -> Offer[Any]:
    """The installed offer that `auto` would prefer on a device.

    Raises:
        LookupError: none that is no wrapper can run there.
    """
    offers = [owned.offer for owned in Registry.discover().offers(hook)]
    fitting = [offer for offer in offers if not offer.wraps and offer.available(device) is None]
    if not fitting:
        raise LookupError(f"none of the installed {hook} could be wrapped on {device.name}")
    return max(fitting, key=lambda offer: offer.rank)


def around(wrapper: Offer[Any], inner: Offer[Any]) -> Offer[Any]:
    """A wrapper that builds as any other offer does, around `inner`, whose capabilities it has."""

    def build(options: Options, **context: Any) -> Any:
        return wrapper.build(options, inner=inner.build(inner.options(), **context), **context)

    return replace(wrapper, build=build, capabilities=inner.capabilities, wraps=False)


__all__ = ["around", "inner_offer"]
