"""`engine plugins check`: hold installed components to the conformance suites of their extension points."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from engine.server.cli.points import find_point
from engine.server.cli.table import table

if TYPE_CHECKING:
    from engine.registry import Owned
    from engine.testing.check import Checked

_HEADERS = ("CLAIM", "CHECKS", "VERDICT", "WHY")
_TOOLS = ("pytest", "hypothesis")
_LONGEST = 86_400.0  # seconds


def _a_time(context: click.Context, parameter: click.Parameter, seconds: float) -> float:
    if not 0 < seconds <= _LONGEST:  # nor is NaN
        raise click.BadParameter(f"{seconds:g} is no time to wait; give seconds above 0, at most {_LONGEST:g}")
    return seconds


@click.command("check", help="Run the conformance suite on NAME (a component, or a plugin): a verdict per claim.")
@click.argument("name")
@click.option("--point", help="Only the component of this extension point, such as kv_cache.")
@click.option("--report", type=click.Path(path_type=Path, dir_okay=False), help="Also write a .json, .xml or .md file.")
@click.option(
    "--timeout", type=float, default=600.0, show_default=True, callback=_a_time, help="Seconds after which to give up."
)
def command(name: str, point: str | None, report: Path | None, timeout: float) -> None:
    """Ends with 1 when a claim doesn't hold, and with 3 when nothing could be checked on this machine."""
    _require_tools()
    from engine.errors import ResourceError
    from engine.testing.check import OutOfTimeError, check
    from engine.testing.report import require_place, write

    if report is not None:
        require_place(report)
    late: OutOfTimeError | None = None
    try:
        results: Sequence[Checked] = check(_offers(name, find_point(point).HOOK if point else None), timeout)
    except OutOfTimeError as error:  # what there is until then is shown before it is said
        results, late = error.results, error
    click.echo("\n\n".join("\n".join(_describe(result)) for result in results))
    if report is not None:
        write(results, report)
    if late is not None:
        raise late
    if any(result.failed for result in results):
        sys.exit(1)
    if all(result.objection for result in results):
        raise ResourceError(f"{name!r} can't be checked on this machine: {results[0].objection}")


def _require_tools() -> None:
    """Raise ResourceError when the kit can't be imported."""
    from engine.errors import ResourceError

    missing = [tool for tool in _TOOLS if find_spec(tool) is None]
    if missing:
        raise ResourceError(
            f"`engine plugins check` needs {' and '.join(_TOOLS)}, but {' and '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not installed; run `pip install {' '.join(missing)}`"
        )


def _offers(name: str, hook: str | None) -> list[tuple[str, Owned[Any]]]:
    """Hooks and offers that `name` means. Raises PluginError when there are none."""
    from engine.discovery import nearest
    from engine.errors import PluginError
    from engine.registry import Registry, noun
    from engine.specs import POINTS

    registry = Registry.discover()
    entry = next((one for one in registry.load() if one.name == name), None)
    if entry is not None and entry.reason:
        raise PluginError(f"the plugin {name!r} of {entry.owner} is {entry.state}: {entry.reason}")
    hooks = [hook] if hook else [point.HOOK for point in POINTS]
    everything = [(one, owned) for one in hooks for owned in registry.offers(one)]
    found = [(one, owned) for one, owned in everything if name in (owned.offer.name, owned.entry.name)]
    if not found:
        known = {name for _, owned in everything for name in (owned.offer.name, owned.entry.name)}
        kind = f"no {noun(hook)}" if hook else "nothing"
        raise PluginError(f"{kind} named {name!r} is installed (see `engine plugins list`){nearest(name, known)}")
    return found


def _describe(result: Checked) -> Iterator[str]:
    yield click.style(result.title, bold=True)
    if result.objection:
        yield f"  not checked: {result.objection}"
        return
    rows = [(v.claim, str(v.passed + v.failed), v.outcome, v.why) for v in result.verdicts]
    yield from (f"  {line}" for line in table(_HEADERS, rows).splitlines())
    failed = [check for check in result.checks if check.outcome == "failed"]
    for check in failed:
        yield f"\n  {check.case}"
        yield from (f"    {line}" for line in check.reason.splitlines()[:8])
    left = sum(check.outcome == "unchecked" for check in result.checks)
    unfinished = f", {left} not run to their end" if left else ""
    seconds = sum(check.seconds for check in result.checks)
    yield f"\n  {len(result.checks)} checks, {len(failed)} failed{unfinished}, {seconds:.1f} s"


__all__ = ["command"]
