"""Parts of the plugin contract that will end, told to whoever still uses them (docs/compatibility-policy.md).

A hook is deprecated by `@hookspec(warn_on_impl=Ending(…))`, an older hook API by an entry of `engine.hooks.ENDING`, an
older number of one extension point by an entry of `ENDING` in its spec module, and everything else (a field, a flag, a
function) by `ending(…)` where it is used. Loading a plugin collects what these say under the plugin's name.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


class Ending(DeprecationWarning):
    """One thing of the contract, the engine version that won't have it any more, and what to use instead."""

    def __init__(self, what: str, *, ends: str, instead: str) -> None:
        super().__init__(f"{what} ends with engine {ends}; {instead}")
        self.what, self.ends, self.instead = what, ends, instead

    def used_by(self, owner: str, entry: str) -> str:
        """The sentence for the user of a plugin: who uses what, until when it works, and what to do."""
        return f"{owner} (entry point {entry}) uses {self.what}, which ends with engine {self.ends}; {self.instead}"


def ending(what: str, *, ends: str, instead: str) -> None:
    """Warn the caller's caller: in a plugin's own tests it is a warning at the line that uses the thing."""
    warnings.warn(Ending(what, ends=ends, instead=instead), stacklevel=3)


@contextmanager
def collected() -> Iterator[list[Ending]]:
    """The endings that are warned of meanwhile, on whatever thread, each once. Other warnings go their usual way."""
    found: list[Ending] = []
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", Ending)
            yield found
    finally:
        for one in caught:
            if isinstance(one.message, Ending):
                found += [one.message] if str(one.message) not in map(str, found) else []
            else:
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)


__all__ = ["Ending", "collected", "ending"]
