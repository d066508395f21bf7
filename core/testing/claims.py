"""Which claim of an offer a check proves.

A claim is a field of `Capabilities` and one of its values, in the form `masks:sliding_window`. A check states in a
marker what it proves; one without a marker holds the offer to the contract that all offers of its extension point keep.
A marker that names the field alone (`page_sizes`) speaks of every value of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Final

import pytest

from engine.capabilities import Capabilities

CONTRACT: Final = "contract"
"""What checks without a marker prove."""

ANY: Final = "any"
"""Stands for the values of a limit that is not declared: no limit is a claim too."""

ABILITIES: Final = frozenset({"masks", "flags"})
"""Fields whose empty set means 'none'; in all others it means 'no limit'."""


def proves(*claims: str) -> pytest.MarkDecorator:
    """Mark a check, or one of its parameters, with the claims that it proves."""
    return pytest.mark.proves(*claims)


def claims_of(capabilities: Capabilities) -> list[str]:
    """What an offer claims, beginning with the contract; the limits that it doesn't declare come as `field:any`."""
    claims = [CONTRACT]
    for field in fields(capabilities):
        value = getattr(capabilities, field.name)
        if isinstance(value, frozenset):
            claims += [f"{field.name}:{one}" for one in sorted(map(str, value))]
            if not value and field.name not in ABILITIES:
                claims.append(f"{field.name}:{ANY}")
        elif value:
            claims.append(f"{field.name}:{'.'.join(map(str, value)) if isinstance(value, tuple) else value}")
    return claims


def proven_by(marked: Iterable[str], claimed: Iterable[str]) -> list[str]:
    """Those of the claims to which a check with these marks belongs.

    A mark with a value stands for that claim, or for `any` where the field is not limited; a bare field for all claims
    of it, unless the same check names values.
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
            found += [claim for claim in (mark, f"{field}:{ANY}") if claim in known]
    return list(dict.fromkeys(found))


__all__ = ["ANY", "CONTRACT", "claims_of", "proven_by", "proves"]
