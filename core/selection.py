"""Choosing one component: the one that the configuration names, or the highest-ranked that fits.

Either way the choice remembers why it was made and why each other candidate was refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final, Generic, TypeVar

from engine.building import BUILD_SECONDS, Source, built
from engine.capabilities import Needs, unmet
from engine.config.components import Named, located, validated_options, wrapped
from engine.config.origins import Key, Origins, dotted
from engine.deadline import within
from engine.device import DeviceProfile
from engine.errors import CompositionError, PluginError
from engine.fit import Placed, clashes
from engine.plugin import Offer, Options
from engine.registry import Owned, Registry, noun

T = TypeVar("T")

ANSWER_SECONDS: Final = 30.0
"""How long `Offer.available` may take. It is meant to take milliseconds."""

Judge = Callable[[Offer[Any], Options], Sequence[str]]
"""Further reasons why an offer does not fit, beside capabilities and availability."""

Preference = Callable[[Offer[Any]], tuple[int, ...]]
"""The larger, the earlier `auto` takes an offer."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate that was not taken: one that does not fit, or one that fits while another was taken."""

    offer: Offer[Any]
    reasons: tuple[str, ...]
    distribution: str  # name and version of its owner
    fits: bool = False

    @property
    def name(self) -> str:
        """The offer's name."""
        return self.offer.name

    @property
    def rank(self) -> int:
        """The offer's rank."""
        return self.offer.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[T]):
    """One chosen component."""

    point: str  # the extension point's hook
    offer: Offer[T]
    options: Options
    distribution: str  # name and version of its owner
    plugin: str  # its entry point
    why: str
    refused: tuple[Refusal, ...] = ()
    build_seconds: float = BUILD_SECONDS  # that `build` may take
    inner: Choice[T] | None = None  # what it wraps

    @property
    def name(self) -> str:
        """The offer's name."""
        return self.offer.name

    @property
    def core(self) -> Offer[T]:
        """The offer that does the work: of the innermost one wrapped. Its capabilities are those of the whole."""
        return self.offer if self.inner is None else self.inner.core

    def build(self, **context: Any) -> T:
        """Make the component, the inner one first; `context` is what its extension point documents.

        Raises as `engine.building.built` does.
        """
        within = {} if self.inner is None else {"inner": self.inner.build(**context)}
        source = Source(self.point, self.name, self.distribution, self.plugin)
        return built(source, lambda: self.offer.build(self.options, **context, **within), self.build_seconds)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What one component must be."""

    component: Named
    needs: Needs
    judge: Judge
    others: tuple[Placed, ...]  # that it must fit


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Chooses among the offers of a registry for one device.

    `parts` are the components chosen so far, `ahead` those that the configuration names and whose turn is to come, both
    by their place in it. What is chosen must fit all of them. A choice is never taken back, so what `auto` takes first
    may leave a later part without candidates; the error then says whom they clash with.
    """

    registry: Registry
    device: DeviceProfile
    origins: Origins
    environ: Mapping[str, str] | None = None
    parts: dict[Key, Placed] = field(default_factory=dict)
    ahead: dict[Key, Placed] = field(default_factory=dict)
    build_seconds: float = BUILD_SECONDS  # that building what was chosen may take

    def settle(self, components: Iterable[Named]) -> None:
        """Note which of the components to be chosen are named; one that isn't installed is told in its turn."""
        for component in components:
            if component.chosen:
                with suppress(PluginError):
                    offer = self.registry.get(component.point, component.use).offer
                    if not offer.wraps:
                        self.ahead[component.key] = Placed(component.point, offer)

    def choose(
        self,
        component: Named,
        needs: Needs,
        *,
        judge: Judge = lambda offer, options: (),
        prefer: Preference = lambda offer: (offer.rank,),
        auto_needs: Needs | None = None,
    ) -> Choice[Any]:
        """The component that fits `needs`; `auto_needs` replaces them where the choice is ours.

        Raises:
            ConfigError: the named component isn't installed, or its options are wrong.
            CompositionError: it does not fit, or (for `auto`) none does; with every reason.
        """
        self.ahead.pop(component.key, None)
        if component.chosen:
            choice = self._named(self._asked(component, needs, judge))
        else:
            choice = self._best(self._asked(component, auto_needs or needs, judge), prefer)
        if choice.offer.wraps:
            within = wrapped(component, choice.options)
            inner = self.choose(within, needs, judge=judge, prefer=prefer, auto_needs=auto_needs)
            choice = replace(choice, inner=inner)
        self.parts[component.key] = Placed(component.point, choice.core)
        return choice

    def _asked(self, component: Named, needs: Needs, judge: Judge) -> _Asked:
        others = {**self.parts, **self.ahead}
        return _Asked(component, needs, judge, tuple(part for key, part in others.items() if key != component.key))

    def _named(self, asked: _Asked) -> Choice[Any]:
        component = asked.component
        offer = located(self.registry, component, self.origins)
        owned = self.registry.get(component.point, component.use)
        options = validated_options(offer, component.options, self.origins, component.key, self.environ)
        if reasons := self._reasons(asked, offer, options):
            start = self.origins.near((*component.key, "use"))
            raise CompositionError(
                f"{start}{dotted(component.key)}: the {noun(component.point)} {offer.name!r} can't be used here: "
                + "; ".join(reasons)
            )
        why = "the default" if component.by_default else "named in the configuration"
        others = [o for o in self.registry.offers(component.point) if o is not owned]
        refused = [self._passed_over(asked, other, f"{offer.name} is {why}") for other in others]
        return self._choice(owned, options, component, why, refused)

    def _passed_over(self, asked: _Asked, owned: Owned[Any], because: str) -> Refusal:
        """What would have come of a candidate that the configuration did not ask for."""
        reasons = self._default_reasons(asked, owned.offer)
        return _refusal(owned, reasons or [f"fits too, but {because}"], fits=not reasons)

    def _default_reasons(self, asked: _Asked, offer: Offer[Any]) -> list[str]:
        """Reasons against an offer with its default options; one that has required options can't be taken unasked."""
        if offer.wraps:
            return ["wraps another component, so it is taken only where it is named"]
        return _no_defaults(offer) or self._reasons(asked, offer, offer.options())

    def _best(self, asked: _Asked, prefer: Preference) -> Choice[Any]:
        component = asked.component
        candidates = sorted(self.registry.offers(component.point), key=lambda owned: prefer(owned.offer), reverse=True)
        fitting, refused = self._sorted(asked, candidates)
        if not fitting and self.ahead:
            # Where only what is named and comes later is in the way, that one is refused in its turn, under its name.
            fitting, refused = self._sorted(replace(asked, others=tuple(self.parts.values())), candidates)
        if not fitting:
            raise CompositionError(self._nothing_fits(component, refused))
        best, *others = fitting
        refused += [_refusal(o, [f"fits too, but {best.offer.name} goes first"], fits=True) for o in others]
        why = "the only one that fits" if not others else f"the first of {len(fitting)} that fit"
        return self._choice(best, best.offer.options(), component, why, refused)

    def _sorted(self, asked: _Asked, candidates: Sequence[Owned[Any]]) -> tuple[list[Owned[Any]], list[Refusal]]:
        """Those that fit, in their order, and the others."""
        judged = [(owned, self._default_reasons(asked, owned.offer)) for owned in candidates]
        return [o for o, reasons in judged if not reasons], [_refusal(o, why) for o, why in judged if why]

    def _reasons(self, asked: _Asked, offer: Offer[Any], options: Options) -> list[str]:
        """Every reason against an offer. The judge, who may open files, is asked when nothing else is in the way.

        Of an offer that wraps another only this machine is asked; what it wraps is judged for it.
        """
        if offer.wraps:
            return objections(offer, self.device, Needs())
        mine = Placed(asked.component.point, offer)
        reasons = objections(offer, self.device, asked.needs)
        reasons += [why for other in asked.others for why in clashes(mine, other)]
        try:
            return reasons or list(asked.judge(offer, options))
        except Exception as error:  # a stranger's code: whatever it raises is its reason not to be taken
            return [_failure(error)]

    def _choice(
        self, owned: Owned[Any], options: Options, component: Named, why: str, refused: Sequence[Refusal]
    ) -> Choice[Any]:
        return Choice(
            point=component.point,
            offer=owned.offer,
            options=options,
            distribution=owned.entry.owner,
            plugin=owned.entry.name,
            why=why,
            refused=tuple(refused),
            build_seconds=self.build_seconds,
        )

    def _nothing_fits(self, component: Named, refused: Sequence[Refusal]) -> str:
        what = noun(component.point)
        if not refused:
            return f"{dotted(component.key)}: no {what} is installed, or none may load; see `engine plugins list`"
        reasons = " | ".join(f"{r.name}: {'; '.join(r.reasons)}" for r in refused)
        return f"{self.origins.near(component.key)}{dotted(component.key)}: no installed {what} fits: {reasons}"


def objections(offer: Offer[Any], device: DeviceProfile, needs: Needs) -> list[str]:
    """Why an offer can't be used on a device for `needs`; empty when it can."""
    reasons = unmet(offer.capabilities, needs)
    try:
        objection = within(ANSWER_SECONDS, lambda: offer.available(device))
        if not isinstance(objection, str | None):
            objection = f"asking it gave {objection!r}, expected None or the reason against it"
    except Exception as error:  # as above
        objection = _failure(error)
    return [*reasons, objection] if objection else reasons


def _failure(error: Exception) -> str:
    return f"asking it failed with {type(error).__name__}: {error}"


def _refusal(owned: Owned[Any], reasons: Sequence[str], *, fits: bool = False) -> Refusal:
    return Refusal(owned.offer, tuple(dict.fromkeys(reasons)), owned.entry.owner, fits)


def _no_defaults(offer: Offer[Any]) -> list[str]:
    required = [name for name, field in offer.options.model_fields.items() if field.is_required()]
    return [f"needs options that have no default: {', '.join(required)}"] if required else []


__all__ = ["Choice", "Judge", "Preference", "Refusal", "Selector", "objections"]
