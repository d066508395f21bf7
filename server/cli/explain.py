"""`engine plugins explain`: what a configuration composes, here or on a device that isn't here, and why."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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
    from engine.config.load import LoadedConfig
    from engine.parsing.choice import Picked
    from engine.registry import Registry

_HEADERS = ("PART", "COMPONENT", "VERDICT", "EXPECTED COST", "WHY")


@click.command("explain", help="Show what CONFIG composes: per part each candidate, taken or not, why, and its cost.")
@config_argument
@device_option
@set_option
@json_option
def command(config: Path | None, device: str | None, overrides: Sequence[str], as_json: bool) -> None:
    """Reads the model's header (fetching the model if it isn't here), no weights; needs no such device."""
    composition, picked = _composed(config, device, overrides)
    if as_json:
        found = {"parsers": {one.part.partition(".")[2]: asdict(one) for one in picked}}
        click.echo(json.dumps(composition.as_dict() | found, indent=2))
        return
    click.echo("\n".join(_heading(composition)) + "\n")
    rows = [(r.part, r.name, str(r.verdict), str(r.cost) if r.cost else "-", r.why) for r in composition.explain()]
    click.echo(table(_HEADERS, [*rows, *_parser_rows(picked)]))


def _parser_rows(picked: Sequence[Picked]) -> Iterator[tuple[str, ...]]:
    for one in picked:
        yield one.part, one.name, "taken", "-", one.why
        for name in one.refused:
            yield one.part, name, "refused", "-", "does not recognize what the model writes"


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


def _composed(
    config: Path | None, device: str | None, overrides: Sequence[str]
) -> tuple[Composition, tuple[Picked, ...]]:
    from engine.compose import compose, resolve_source
    from engine.device import detect
    from engine.device_profiles import load_profile

    loaded, registry = loaded_with_registry(config, overrides)
    profile = detect(loaded.config.device.kind) if device is None else load_profile(device)
    files = resolve_source(loaded.config, registry, _say, loaded.origins)
    composition = compose(loaded.config, registry, profile, files.path, loaded.origins)
    return composition, _picked(loaded, registry, files.path)


def _picked(loaded: LoadedConfig, registry: Registry, path: Path) -> tuple[Picked, ...]:
    """The parsers of answers; none where the model has no tokenizer, without which it can't be served either."""
    from engine.errors import ResourceError
    from engine.model_tokenizer import load_tokenizer
    from engine.parsing.choice import choose_parsers

    try:
        tokenizer = load_tokenizer(loaded.config, registry, path)
    except ResourceError as error:
        click.echo(f"the parsers can't be told: {error}", err=True)
        return ()
    model = tokenizer.model_text(loaded.config.model.chat_template)
    return choose_parsers(loaded.config, registry, model, loaded.origins).picked


def _say(share: float, words: str) -> None:
    click.echo(f"{share:4.0%} {words}", err=True)


__all__ = ["command"]
