"""Building a component, the first of a plugin's code that does real work: bounded, checked and blamed by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple, TypeVar

from engine.deadline import Overdue, within
from engine.errors import EngineError, PluginError
from engine.specs import POINTS

T = TypeVar("T")

BUILD_SECONDS: Final = 300.0
"""How long building one component may take, unless `plugins.build_seconds` says otherwise."""

READERS: Final = frozenset({"models", "executors"})
"""Extension points whose `build` reads the weights: it may take any time, belongs on its caller's thread, and an
OSError, ValueError or KeyError it raises is about the checkpoint."""

_CLASSES: Final[Mapping[str, type | tuple[type, ...]]] = {
    point.HOOK: getattr(point, "BUILDS", object) for point in POINTS
}


class Source(NamedTuple):
    """Whose component is built."""

    point: str  # the extension point's hook
    name: str
    owner: str  # distribution and version
    plugin: str  # the entry point

    def blamed(self, what: str) -> PluginError:
        """The error that names them all."""
        return PluginError(
            f"{self.name!r} of {self.point}, offered by {self.owner} (entry point {self.plugin}), {what}; "
            "name another component in the configuration, or upgrade that package"
        )


def built(source: Source, build: Callable[[], T], seconds: float = BUILD_SECONDS) -> T:
    """What `build` makes.

    Raises:
        PluginError: it raises, does not come back in time, or makes something that is not of the extension point.
        EngineError: what `build` itself raises of that kind, which names the remedy already.
    """
    passed: tuple[type[Exception], ...] = (EngineError,)
    if source.point in READERS:
        passed = (EngineError, OSError, ValueError, KeyError)
    try:
        made = build() if source.point in READERS else within(seconds, build)
    except passed:
        raise
    except Overdue as error:
        raise source.blamed(f"{error} from build (plugins.build_seconds)") from None
    except (Exception, SystemExit) as error:
        raise source.blamed(f"can't be built: {type(error).__name__}: {error}") from error
    expected = _CLASSES[source.point]
    if not isinstance(made, expected):
        wanted = " or ".join(one.__name__ for one in (expected if isinstance(expected, tuple) else (expected,)))
        raise source.blamed(f"builds a {type(made).__name__}, expected a subclass of {wanted}")
    return made


__all__ = ["BUILD_SECONDS", "READERS", "Source", "built"]
