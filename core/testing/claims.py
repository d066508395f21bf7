"""Which claim of an offer a check proves.

A claim is a field of `Capabilities` and one of its values, in the form `masks:sliding_window`. A check states in a
marker what it proves; one without a marker holds the offer to the contract that all offers of its extension point keep.
A marker that names the field alone (`page_sizes`) speaks of every value of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import fields
from typing import Any, Final

import pytest

from engine.capabilities import Capabilities, listed

CONTRACT: Final = "contract"
"""What checks without a marker prove."""

ANY: Final = "any"
"""Stands for the values of a limit that is not declared: no limit is a claim too."""

ABILITIES: Final = frozenset({"masks", "flags"})
"""Fields whose empty set means 'none'; in all others it means 'no limit'."""


MOST: Final = 8
"""Values of one limit that get a verdict each; of more, some are tried for all."""


def proves(*claims: str) -> pytest.MarkDecorator:
    """Mark a check, or one of its parameters, with the claims that it proves."""
    return pytest.mark.proves(*claims)


def claims_of(capabilities: Capabilities) -> list[str]:
    """What an offer claims, beginning with the contract; the limits that it doesn't declare come as `field:any`."""
    claims = [CONTRACT]
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if isinstance(value, frozenset):
            claims += [
                f"{field.name}:{one}" for one in ([listed(value)] if len(value) > MOST else sorted(map(str, value)))
            ]
            if not value and field.name not in ABILITIES:
                claims.append(f"{field.name}:{ANY}")
        elif value:
            claims.append(f"{field.name}:{'.'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return claims


def proven_by(marked: Iterable[str], claimed: Iterable[str]) -> list[str]:
    """Those of the claims to which a check with these marks belongs.

    A mark with a value stands for that claim, or for the one that covers it (`any`, or many values at once); a bare
    field for all claims of it, unless the same check names values.
    """
    marked, known = list(marked), list(claimed)
    if not marked:
        return [CONTRACT]
    detailed = {mark.partition(":")[0] for mark in marked if ":" in mark}
    found: list[str] = []
    for mark in marked:
        field, _, value = mark.partition(":")
        if not value and field not in detailed:
            found += [claim for claim in known if claim.partition(":")[0] == field]
        elif value:
            found += [mark] if mark in known else [claim for claim in known if _covers(claim, field)]
    return list(dict.fromkeys(found))


def _covers(claim: str, field: str) -> bool:
    """Whether a claim speaks of more values of the field than one."""
    name, _, value = claim.partition(":")
    return name == field and (value == ANY or ", " in value)


def some(claimed: Collection[Any], usual: Iterable[Any], most: int = 6, up_to: int | None = None) -> list[Any]:
    """Values of a limit to try: the usual ones without a limit; of many, both ends and some between.

    Numbers above `up_to`, which cost too much to try often, are left out if there are smaller ones.
    """
    values = sorted(claimed) or list(usual)
    if up_to is not None:
        values = [value for value in values if value <= up_to] or values[:1]
    if len(values) <= most:
        return values
    return [values[i * (len(values) - 1) // (most - 1)] for i in range(most)]


__all__ = ["ANY", "CONTRACT", "claims_of", "proven_by", "proves", "some"]
