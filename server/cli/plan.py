"""`engine plan`: what a configuration takes of a device, told before anything is loaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.server.cli.parameters import json_option, loaded_with_registry, set_option
from engine.server.cli.table import table

if TYPE_CHECKING:
    from engine.config.origins import Origins
    from engine.planning.kv import KVForm
    from engine.planning.plan import Plan
    from engine.planning.ranks import RankFit

_GIB = 2**30


@click.command(
    help="Compute what CONFIG takes of a device: bytes of weights and of the KV cache, pages, requests at a context "
    "length, what is on and off, slow paths, and how the model divides among ranks. Reads the model's header only; "
    "CONFIG may also be a model's config.json.",
    epilog="""\b
Examples:
  engine plan                                 the default model on this machine
  engine plan my.yaml --device h200           as if on an H200
  engine plan config.json --device h200 --compare mha,gqa8,mla --context 131072
""",
)
@click.argument("config", required=False, type=click.Path(path_type=Path))
@click.option("--device", metavar="NAME|FILE", help="A known device (h200, a100, rtx4090, cpu, …) or a YAML file.")
@click.option("--context", type=click.IntRange(min=1), help="Tokens per request; by default the most there can be.")
@click.option("--compare", metavar="FORM,…", help="Forms of attention to compare: mha, gqaN (gqa8), mla, mla-fp8.")
@set_option
@json_option
def command(
    config: Path | None,
    device: str | None,
    context: int | None,
    compare: str | None,
    overrides: Sequence[str],
    as_json: bool,
) -> None:
    """Exit code 0 even when the plan says that the engine would not start: that is an answer too."""
    plan = _plan(config, device, context, [f.strip() for f in (compare or "").split(",") if f.strip()], overrides)
    click.echo(json.dumps(asdict(plan), indent=2, default=sorted) if as_json else "\n".join(_lines(plan)))


def _plan(
    config: Path | None, device: str | None, context: int | None, forms: Sequence[str], overrides: Sequence[str]
) -> Plan:
    from engine.compose import resolve_source
    from engine.device import detect
    from engine.device_profiles import load_profile
    from engine.planning.plan import make_plan

    if config is not None and config.suffix == ".json":
        if config.name != "config.json":
            raise click.UsageError(
                f"{config} is read as a model's config.json; give it that name, in a folder of its own"
            )
        made = [f"model.source={json.dumps(f'path:{config.parent.absolute()}')}", "model.loader=dummy"]
        loaded, registry = loaded_with_registry(None, [*made, *overrides])
        loaded = replace(loaded, origins=_as_told_by(config, loaded.origins, overrides))
    else:
        loaded, registry = loaded_with_registry(config, overrides)
    found = detect(loaded.config.device.kind) if device is None else load_profile(device)
    files = resolve_source(loaded.config, registry, lambda share, words: None, loaded.origins)
    try:
        return make_plan(
            loaded.config, registry, found, files.path, context=context, forms=forms, origins=loaded.origins
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from None


def _as_told_by(config: Path, origins: Origins, overrides: Sequence[str]) -> Origins:
    """So that an error about what was made of a config.json names that file, and no `--set` that nobody typed."""
    typed = {override.partition("=")[0].strip() for override in overrides}
    made = {f"--set {key}" for key in ("model.source", "model.loader") if key not in typed}
    return replace(
        origins,
        written={
            key: replace(origin, text=str(config)) if origin.text in made else origin
            for key, origin in origins.written.items()
        },
    )


def _lines(plan: Plan) -> Iterable[str]:
    profile = plan.profile
    yield f"model    {profile.architecture}: {profile.parameters / 1e9:,.3f} B weights in {profile.layers} layers"
    yield f"device   {plan.device.name}: {_size(plan.device.memory_bytes)}"
    yield f"dtype    {plan.dtype}"
    yield f"context  {plan.context:,} tokens a request\n"
    yield from _weights(plan)
    yield from _cache(plan)
    yield from _forms(plan)
    yield from _ranks(plan)
    for title, words in (("ON", plan.on), ("OFF", plan.off), ("SLOW PATHS", plan.slow), ("BLOCKED", plan.blocked)):
        if words:
            yield "\n".join([click.style(title, bold=True), *(f"  {word}" for word in words), ""])
    yield "This engine would not start; see BLOCKED." if plan.blocked else "This engine would start."


def _weights(plan: Plan) -> Iterable[str]:
    rows = [(g.name, f"{g.elements:,}", f"{g.bytes:,}", _size(g.bytes)) for g in plan.weights]
    total = sum(g.elements for g in plan.weights) or plan.profile.parameters
    label = "all" if plan.weights else "all (estimated)"
    yield table(("WEIGHTS", "ELEMENTS", "BYTES", "SIZE"), [*rows, (label, f"{total:,}", *_sizes(plan.weight_bytes))])
    if plan.stored_bytes:
        yield f"(the checkpoint stores them in FP8 blocks: {plan.stored_bytes:,} bytes, {_size(plan.stored_bytes)})"
    yield ""


def _cache(plan: Plan) -> Iterable[str]:
    if plan.pool is None:
        return
    pool = plan.pool
    rows = [
        ("a token", *_sizes(pool.bytes_per_token)),
        (f"a page of {pool.page_size} tokens", *_sizes(pool.bytes_per_token * pool.page_size)),
        (f"a request of {plan.context:,} tokens", *_sizes(pool.bytes_per_token * plan.context)),
        (f"the pool: {pool.pages:,} pages, {pool.requests:,} such requests", *_sizes(pool.bytes)),
    ]
    yield table(("KV CACHE", "BYTES", "SIZE"), rows)
    yield ""


def _forms(plan: Plan) -> Iterable[str]:
    """A request's KV in each form, and how its bytes compare with the model's own, both at one byte per element."""
    if len(plan.forms) < 2:
        return
    at_one = [form.bytes_per_token(plan.profile.layers, 1) for form in plan.forms]
    rows = [
        (form.name, form.meaning, *_form_sizes(plan, form), f"{size / at_one[0]:.2f}×")
        for form, size in zip(plan.forms, at_one, strict=True)
    ]
    headers = ("ATTENTION", "KEPT FOR A TOKEN AND LAYER", "AT 1 BYTE", "AT 2 BYTES", "TO THIS MODEL")
    yield table(headers, rows)
    yield ""


def _form_sizes(plan: Plan, form: KVForm) -> tuple[str, str]:
    """Of a request at one and at two bytes per element; a format that fixes the row has one size only."""
    sizes = [plan.context * form.bytes_per_token(plan.profile.layers, itemsize) for itemsize in (1, 2)]
    one, two = (f"{size / _GIB:,.3f} GiB" for size in sizes)
    return (one, two) if form.row_bytes is None else (one, "-")


def _ranks(plan: Plan) -> Iterable[str]:
    if plan.weights:
        yield from _rank_table(plan, plan.ranks, f"IN {plan.dtype}")
    if plan.stored_ranks:
        yield from _rank_table(plan, plan.stored_ranks, "AS STORED IN FP8")
    if plan.weights:
        yield "(arithmetic of tensor and expert parallelism; the executor must offer it)\n"


def _rank_table(plan: Plan, fits: Iterable[RankFit], kept: str) -> Iterable[str]:
    rows = [
        (
            str(fit.ranks),
            _size(fit.weight_bytes),
            f"{fit.kv_bytes_per_token:,}",
            "; ".join(fit.problems) or (f"{fit.requests:,} requests" if fit.requests else "does not fit"),
        )
        for fit in fits
    ]
    yield table(("RANKS", f"WEIGHTS A RANK {kept}", "KV BYTES A TOKEN", f"AT {plan.context:,} TOKENS"), rows)


def _sizes(count: int) -> tuple[str, str]:
    return f"{count:,}", _size(count)


def _size(count: int) -> str:
    """With the largest unit of which there is one or more."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= unit:
            return f"{count / unit:,.2f} {name}"
    return f"{count} B"


__all__ = ["command"]
