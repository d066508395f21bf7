"""Whether what a plugin's hook returned is a sound offer.

Asked once, when the plugin is loaded, so that nobody who compares, ranks or prints offers later meets a field that is
something else than `engine.plugin.Offer` says.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from types import ModuleType
from typing import Any, Final

from engine.capabilities import DEVICES, DTYPES, Capabilities, Flag, KVKind, Mask, Needs
from engine.config.shadows import shadowed
from engine.deprecation import Ending, ending
from engine.discovery import nearest
from engine.plugin import Offer, Options, WrapperOptions
from engine.specs import POINTS

_HOOKS: Final = frozenset(point.HOOK for point in POINTS)


def require_sound(point: ModuleType, offer: Any) -> None:
    """Raise TypeError or ValueError when what a hook of `point` (a module of `engine.specs`) returned is no offer."""
    wanted: type[Offer[Any]] = getattr(point, "OFFER", Offer)
    if not isinstance(offer, wanted):
        raise TypeError(f"{point.HOOK} returned {type(offer).__name__}, expected {wanted.__name__}")
    if not _line(offer.name) or not offer.name or offer.name == "auto":
        raise ValueError(f"{point.HOOK} offers the name {offer.name!r}, expected a non-empty text other than 'auto'")
    _check_api(point, offer)
    _check_options(point, offer)
    if not callable(offer.build):
        raise TypeError(f"the build of {offer.name!r} can't be called")
    if not isinstance(offer.capabilities, Capabilities):
        raise TypeError(f"the capabilities of {offer.name!r} must be an engine.plugin.Capabilities")
    for name, (sound, expected) in _FIELDS.items():
        if name in {field.name for field in fields(offer)} and not sound(value := getattr(offer, name)):
            raise TypeError(f"the {name} of {offer.name!r} is {value!r}, expected {expected}")
    _check_requirements(offer)


def _check_api(point: ModuleType, offer: Offer[Any]) -> None:
    """Raise ValueError for a number of the extension point that isn't spoken; warn of one that will end."""
    older: Mapping[int, Ending] = getattr(point, "ENDING", {})
    if old := older.get(offer.api):
        ending(old.what, ends=old.ends, instead=old.instead)
    elif offer.api != point.API:
        raise ValueError(
            f"{offer.name!r} is written for version {offer.api} of {point.HOOK}, this engine speaks {point.API}"
        )


def _check_options(point: ModuleType, offer: Offer[Any]) -> None:
    if not (isinstance(offer.options, type) and issubclass(offer.options, Options)):
        raise TypeError(f"the options of {offer.name!r} must be a subclass of engine.plugin.Options")
    if offer.wraps and not issubclass(offer.options, WrapperOptions):
        raise TypeError(f"{offer.name!r} wraps, so its options must be a subclass of engine.plugin.WrapperOptions")
    if problem := shadowed(point.HOOK, offer.options):
        raise ValueError(f"the options of {offer.name!r} have a field {problem}; rename it")
    if offer.options.model_config.get("extra") != "forbid":
        raise ValueError(f"the options of {offer.name!r} must refuse unknown keys (extra='forbid'), as Options does")


def _check_requirements(offer: Offer[Any]) -> None:
    for hook, needs in offer.requires.items():
        if hook not in _HOOKS:
            raise ValueError(
                f"{offer.name!r} requires something of {hook!r}, no extension point{nearest(str(hook), _HOOKS)}"
            )
        for name, (sound, expected) in _NEEDS.items():
            if not sound(value := getattr(needs, name)):
                raise ValueError(
                    f"what {offer.name!r} requires of {hook} has the {name} {value!r}, which is not of the vocabulary; "
                    f"expected {expected}"
                )


def _line(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and value == value.strip()


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < float("inf")


def _mapping(value: Any, key: Callable[[Any], bool], item: Callable[[Any], bool]) -> bool:
    return isinstance(value, Mapping) and all(key(k) and item(v) for k, v in value.items())


def _members(of: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, frozenset) and all(isinstance(each, of) for each in value)


_FIELDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "summary": (_line, "a text of one line"),
    "available": (callable, "a function of the device"),
    "wraps": (lambda v: isinstance(v, bool), "True or False"),
    "rank": (lambda v: type(v) is int, "a whole number"),
    "requires": (
        lambda v: _mapping(v, lambda k: True, lambda n: isinstance(n, Needs)),
        "extension points' hooks with an engine.plugin.Needs each",
    ),
    "efficiency": (
        lambda v: _mapping(v, DEVICES.__contains__, lambda share: _positive(share) and share <= 1),
        f"shares above 0 and up to 1 for devices among {', '.join(sorted(DEVICES))}",
    ),
    # models
    "architectures": (lambda v: _members(str)(v) and len(v) > 0, "a frozenset of names as config.json has them"),
    "profile": (callable, "a function of the model's config"),
    "weights": (lambda v: v is None or callable(v), "a function of the model's config, or None"),
    # parsers
    "recognizes": (callable, "a function of the model's text"),
    # quantizations
    "bytes_per_weight": (lambda v: v is None or _positive(v), "a positive number, or None"),
    "formats": (
        lambda v: _mapping(v, lambda k: isinstance(k, str), _positive),
        "names of formats with the bytes of a weight each",
    ),
    "copies_tied_head": (lambda v: isinstance(v, bool), "True or False"),
}
"""Fields of offers, those of single extension points too -> whether a value is sound, and what would be."""

_NEEDS: Final[Mapping[str, tuple[Callable[[Any], bool], str]]] = {
    "device": (lambda v: v is None or v in DEVICES, f"one of {', '.join(sorted(DEVICES))}"),
    "dtype": (lambda v: v is None or v in DTYPES, f"one of {', '.join(sorted(DTYPES))}"),
    "kv_kind": (lambda v: v is None or isinstance(v, KVKind), "an engine.plugin.KVKind"),
    "page_size": (lambda v: v is None or (type(v) is int and v > 0), "a positive number"),
    "head_dim": (lambda v: v is None or (type(v) is int and v > 0), "a positive number"),
    "masks": (_members(Mask), "a frozenset of engine.plugin.Mask"),
    "flags": (_members(Flag), "a frozenset of engine.plugin.Flag"),
}
"""Fields of `Needs` -> whether a value is of the vocabulary, and what would be."""

__all__ = ["require_sound"]
