"""The conformance suite of every extension point, in one table, and the test class that holds one offer to it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from engine.device import DeviceProfile, detect
from engine.plugin import Offer
from engine.registry import Registry
from engine.testing.offer import OfferConformance
from engine.testing.wrapping import around, inner_offer

SUITES: Final[Mapping[str, str]] = {
    "attention_backends": "engine.testing.attention:AttentionConformance",
    "kv_caches": "engine.testing.kv_cache:KVCacheConformance",
    "kv_connectors": "engine.testing.kv_connector:KVConnectorConformance",
    "speculators": "engine.testing.speculator:SpeculatorConformance",
    "models": "engine.testing.model:ModelConformance",
    "model_sources": "engine.testing.model_source:ModelSourceConformance",
    "weight_loaders": "engine.testing.weight_loader:WeightLoaderConformance",
    "quantizations": "engine.testing.quantization:QuantizationConformance",
    "executors": "engine.testing.executor:ExecutorConformance",
    "scheduling_policies": "engine.testing.scheduling:SchedulingConformance",
    "observers": "engine.testing.observer:ObserverConformance",
    "cli_commands": "engine.testing.cli_command:CLICommandConformance",
    "server_routes": "engine.testing.server_route:ServerRouteConformance",
    "grammars": "engine.testing.grammar:GrammarConformance",
    "reasoning_parsers": "engine.testing.reasoning_parser:ReasoningParserConformance",
    "tool_parsers": "engine.testing.tool_parser:ToolParserConformance",
    "rate_limits": "engine.testing.rate_limit:RateLimitConformance",
}
"""Hook of an extension point -> its suite. A new extension point adds a line."""


def suite(hook: str) -> type[OfferConformance]:
    """The suite of an extension point, given the name of its hook. Imports pytest, and torch for most suites."""
    module, _, name = SUITES[hook].partition(":")
    found: type[OfferConformance] = getattr(import_module(module), name)
    return found


def suite_for(
    hook: str, plugin: object, name: str, device: DeviceProfile = OfferConformance.device
) -> type[OfferConformance]:
    """A test class for the offer `name` that a plugin (a module, or an object) makes at an extension point.

    One that wraps is tested around the installed component that `auto` would take.
    """
    offers: list[Offer[Any]] = list(getattr(plugin, hook)())
    offer = next(one for one in offers if one.name == name)
    if offer.wraps:
        offer = around(offer, inner_offer(hook, device))
    module = plugin.__name__ if isinstance(plugin, ModuleType) else type(plugin).__module__
    title = "Test" + "".join(word.capitalize() for word in name.replace("-", "_").split("_"))
    return type(title, (suite(hook),), {"offer": offer, "module": module, "device": device, "__doc__": offer.summary})


def installed(hook: str, name: str) -> type[OfferConformance]:
    """The test class for an installed offer. Raises as `Registry.get` and `device_of` do."""
    owned = Registry.discover().get(hook, name)
    return suite_for(hook, owned.entry.load(), name, device_of(owned.offer))


def device_of(offer: Offer[Any]) -> DeviceProfile:
    """The device that the suite of an offer runs on: the CPU if the offer claims it, else the one it needs.

    Raises:
        ResourceError: this machine lacks that device.
    """
    devices = offer.capabilities.devices
    return detect("cpu" if not devices or "cpu" in devices else "cuda")


__all__ = ["SUITES", "device_of", "installed", "suite", "suite_for"]
