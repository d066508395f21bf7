"""`engine plugins explain`: what a configuration composes, here or on a device that isn't here, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.server.cli.parameters import (
    config_argument,
    device_option,
    json_option,
    loaded_with_registry,
    set_option,
)
from engine.server.cli.table import table

if TYPE_CHECKING:
    from engine.composition import Composition

_HEADERS = ("PART", "COMPONENT", "VERDICT", "EXPECTED COST", "WHY")


@click.command("explain", help="Show what CONFIG composes: per part each candidate, taken or not, why, and its cost.")
@config_argument
@device_option
@set_option
@json_option
def command(config: Path | None, device: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Reads the model's header (fetching the model if it isn't here), no weights; needs no such device."""
    composition = _composed(config, device, overrides)
    if as_json:
        click.echo(json.dumps(composition.as_dict(), indent=2))
        return
    click.echo("\n".join(_heading(composition)) + "\n")
    rows = composition.explain()
    click.echo(table(_HEADERS, ((r.part, r.name, r.verdict, str(r.cost) if r.cost else "-", r.why) for r in rows)))


def _heading(composition: Composition) -> Iterator[str]:
    from engine.costs import TOKENS
    from engine.device_profiles import with_figures

    profile, device = composition.profile, composition.device
    yield f"model   {profile.architecture}, {profile.parameters / 1e6:,.0f} M weights, from {composition.model_path}"
    yield f"device  {device.kind}: {device.name}{'' if device.here else ', as written down'}"
    yield f"dtype   {composition.dtype}, at most {composition.max_context} tokens a request"
    if with_figures(device).bandwidth_bytes_per_s:
        yield f"cost    of one request of {min(TOKENS, composition.max_context):,} tokens, all layers, alone there"
    else:
        yield "cost    unknown: the device's bandwidth is not in the table; a file with it can be given by --device"


def _composed(config: Path | None, device: str | None, overrides: Sequence[str]) -> Composition:
    from engine.compose import compose, resolve_source
    from engine.device import detect
    from engine.device_profiles import load_profile

    loaded, registry = loaded_with_registry(config, overrides)
    profile = detect(loaded.config.device.kind) if device is None else load_profile(device)
    files = resolve_source(loaded.config, registry, _say, loaded.origins)
    return compose(loaded.config, registry, profile, files.path, loaded.origins)


def _say(share: float, words: str) -> None:
    click.echo(f"{share:4.0%} {words}", err=True)


__all__ = ["command"]
