"""What every offer must keep, whatever its extension point: the base of all conformance suites.

A suite is a class that a plugin's tests subclass, naming the offer and the module that declares it:

    class TestMine(KVCacheConformance):
        (offer,) = my_package.plugin.kv_caches()
        module = "my_package.plugin"

Suites ask for capabilities, never for names, and skip with the missing capability as the reason.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from typing import Any, ClassVar

import pytest
from pydantic import ValidationError

from engine.capabilities import Needs, unmet
from engine.device import DeviceProfile
from engine.plugin import Offer, Options
from engine.testing.claims import proves, some

CPU = DeviceProfile(kind="cpu", name="CPU of the conformance kit", memory_bytes=2**33, cores=2)
"""A plain CPU without any optional feature."""

HEAVY = ("torch", "triton", "transformers")
"""Modules that a declaring module may not import: listing the installed plugins must stay instant."""


class OfferConformance:
    """Subclasses set `offer` and `module`; `device` if the offer doesn't run on a plain CPU."""

    offer: ClassVar[Offer[Any]]
    module: ClassVar[str]
    device: ClassVar[DeviceProfile] = CPU
    api: ClassVar[int] = 1
    most: ClassVar[int] = 6  # values of one limit that are tried

    def options(self) -> Options:
        """The options the suite builds with: the defaults, unless a subclass overrides this."""
        return self.offer.options()

    def require(self, needs: Needs) -> None:
        """Skip the test when the offer doesn't claim what it is about."""
        if reasons := unmet(self.offer.capabilities, needs):
            pytest.skip(f"{self.offer.name}: {'; '.join(reasons)}")

    def test_offer_speaks_this_api(self) -> None:
        """The engine refuses any other number."""
        assert self.offer.api == self.api

    def test_offer_says_what_it_is(self) -> None:
        """A name that fits on a YAML line, and a summary of one line."""
        assert self.offer.name == self.offer.name.strip() != ""
        assert self.offer.summary
        assert "\n" not in self.offer.summary

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Called by pytest for each check; suites add the limits that their own checks go through."""
        self.each(metafunc, "kind", "devices", [self.device.kind])

    def each(self, metafunc: pytest.Metafunc, argument: str, field: str, usual: Iterable[Any]) -> None:
        """Run a check that takes `argument` for the values the offer claims of a limit, or the usual ones.

        A check that is marked with the field proves each value by its own case.
        """
        about = any(field in mark.args for mark in metafunc.definition.iter_markers("proves"))
        values = some(getattr(self.offer.capabilities, field), usual, self.most)
        self.cases(metafunc, argument, [pytest.param(v, marks=proves(f"{field}:{v}") if about else ()) for v in values])

    def cases(self, metafunc: pytest.Metafunc, argument: str, values: Iterable[Any]) -> None:
        """Run a check that takes `argument` for each value, unless it has a parametrization of its own."""
        own = any(argument in str(mark.args[0]) for mark in metafunc.definition.iter_markers("parametrize"))
        if argument in metafunc.fixturenames and not own:
            metafunc.parametrize(argument, values)

    @proves("devices")
    def test_offer_is_available_on_the_device_of_the_suite(self, kind: str) -> None:
        """Else every other test would be about nothing. Other devices that the offer claims are left unchecked."""
        if kind != self.device.kind:
            pytest.skip(f"this run is on {self.device.kind}, not on {kind}")
        assert self.offer.available(self.device) is None

    def test_options_are_described_and_strict(self) -> None:
        """Every option carries a description; unknown ones are refused; values are final."""
        for name, field in self.offer.options.model_fields.items():
            assert field.description, f"option {name} has no description"
        with pytest.raises(ValidationError, match="no_such_option"):
            self.offer.options.model_validate({"no_such_option": 1})
        assert self.offer.options.model_config.get("frozen") is True

    def test_declaring_module_is_light(self) -> None:
        """Importing it loads no heavy library."""
        code = f"import sys, {self.module}; print([m for m in {HEAVY!r} if m in sys.modules])"
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert found.stdout.strip() == "[]"


__all__ = ["CPU", "OfferConformance"]
