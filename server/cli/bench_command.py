"""`engine bench`: put load on an OpenAI endpoint and print what its clients saw."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import msgspec

from engine.server.cli import bench_spec
from engine.server.cli.endpoint import Endpoint, EndpointError
from engine.server.cli.workload import Report, Sample, Workload, run

_LATENCIES = ("ttft", "itl", "tpot", "e2e")


def _levels(context: click.Context, option: click.Parameter, value: str | None) -> list[int] | None:
    if value is None:
        return None
    try:
        levels = [int(part) for part in value.split(",")]
    except ValueError:
        levels = [0]
    if any(level < 1 for level in levels):
        raise click.BadParameter("give whole numbers above 0, such as 1,16,64")
    return levels


@click.group("bench", invoke_without_command=True)
@click.pass_context
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server, with or without /v1.")
@click.option("--model", help="Name of the model; the first that the server lists if unset.")
@click.option("--api-key", help="Key to send as a bearer token.")
@click.option("--concurrency", callback=_levels, metavar="N[,N…]", help="Most requests at once; one run for each N.")
@click.option("--request-rate", type=click.FloatRange(0, min_open=True), help="Requests per second, at random times.")
@click.option("--num-requests", type=click.IntRange(1), help="Requests in each run; twice the concurrency if unset.")
@click.option("--prompt-tokens", type=click.IntRange(1), default=128, show_default=True, help="Words in a prompt.")
@click.option("--max-tokens", type=click.IntRange(1), default=64, show_default=True, help="Tokens in an answer.")
@click.option("--shared-prefix", type=click.FloatRange(0, 1), default=0.0, help="Share that all prompts begin with.")
@click.option("--ignore-eos/--no-ignore-eos", default=True, show_default=True, help="Go on to max-tokens regardless.")
@click.option("--chat", is_flag=True, help="Use /v1/chat/completions instead of /v1/completions.")
@click.option("--seed", type=int, help="Makes the same prompts again; random if unset, so that no cache knows them.")
@click.option(
    "--trace",
    "trace_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write what the server did step by step here, for chrome://tracing; takes a key with the scope admin.",
)
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all numbers here.")
def command(
    context: click.Context,
    /,
    url: str,
    model: str | None,
    api_key: str | None,
    concurrency: list[int] | None,
    json_path: Path | None,
    trace_path: Path | None,
    **load: Any,
) -> None:
    """Measure latency and throughput of an OpenAI endpoint, or what speculators bring (spec).

    \b
    engine bench --concurrency 1,16,64
    engine bench --url http://host:8000 --request-rate 4 --num-requests 100 --shared-prefix 0.8
    engine bench --concurrency 8 --api-key $OPERATOR_KEY --trace trace.json
    """
    if context.invoked_subcommand is not None:
        return
    endpoint = Endpoint(url, api_key)
    seed = random.randrange(2**31) if load["seed"] is None else load["seed"]
    levels = concurrency or [load["num_requests"] or 16 if load["request_rate"] else 1]
    workloads = [_workload(level, seed + i, load) for i, level in enumerate(levels)]
    name, reports, trace = asyncio.run(_run_traced(endpoint, model, workloads, wanted=trace_path is not None))
    _print(name, endpoint.url, reports)
    if trace_path is not None:
        trace_path.write_bytes(msgspec.json.encode(trace))
        _print_trace(trace, trace_path)
    if json_path is not None:
        rows = [{"workload": asdict(report.workload), **report.summary()} for report in reports]
        data = {"url": endpoint.url, "model": name, "runs": rows}
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")
    if any(report.summary()["failed"] for report in reports):
        raise EndpointError("some requests failed; see the table")


def _workload(concurrency: int, seed: int, load: dict[str, Any]) -> Workload:
    return Workload(
        requests=load["num_requests"] or 2 * concurrency,
        prompt_tokens=load["prompt_tokens"],
        max_tokens=load["max_tokens"],
        shared_prefix=load["shared_prefix"],
        concurrency=concurrency,
        rate=load["request_rate"],
        ignore_eos=load["ignore_eos"],
        chat=load["chat"],
        seed=seed,
    )


async def _run_traced(
    endpoint: Endpoint, model: str | None, workloads: Sequence[Workload], *, wanted: bool
) -> tuple[str, list[Report], dict[str, Any]]:
    """Run all, with a trace of the server if it is wanted."""
    if not wanted:
        return *await _run_all(endpoint, model, workloads), {}
    await endpoint.post("/engine/trace", {"on": True})
    try:
        name, reports = await _run_all(endpoint, model, workloads)
    finally:
        trace = await endpoint.post("/engine/trace", {"on": False})
    return name, reports, trace


async def _run_all(endpoint: Endpoint, model: str | None, workloads: Sequence[Workload]) -> tuple[str, list[Report]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    name = model or await endpoint.first_model()
    reports = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        for workload in workloads:
            task = progress.add_task(f"{workload.concurrency} at once", total=workload.requests)

            def ended(sample: Sample, task: Any = task) -> None:
                progress.advance(task)

            reports.append(await run(endpoint, name, workload, ended))
    return name, reports


def _print(model: str, url: str, reports: Sequence[Report]) -> None:
    """A column for each level of concurrency: so it fits a terminal."""
    from rich.console import Console
    from rich.table import Table

    load = reports[0].workload
    rows = [report.summary() for report in reports]
    table = Table(
        title=f"{model} at {url}",
        caption=f"prompts of {load.prompt_tokens} words, {load.max_tokens} tokens out; ms: p50 / p90 / p99",
    )
    table.add_column("at once")
    for row in rows:
        table.add_column(str(row["concurrency"]), justify="right")
    table.add_row("requests", *(str(row["requests"]) for row in rows))
    table.add_row("failed", *(str(row["failed"]) for row in rows))
    table.add_row("requests/s", *(f"{row['requests_per_second']:.2f}" for row in rows))
    table.add_row("output tokens/s", *(f"{row['output_tokens_per_second']:.1f}" for row in rows))
    table.add_row("all tokens/s", *(f"{row['total_tokens_per_second']:.1f}" for row in rows))
    table.add_row("prompt cached", *(f"{row['cached_tokens'] / max(1, row['prompt_tokens']):.0%}" for row in rows))
    for name in _LATENCIES:
        table.add_row(name.upper(), *(_milliseconds(row[name]) for row in rows))
    console = Console()
    console.print(table)
    for text in sorted({text for row in rows for text in row["errors"]}):
        console.print(f"failed: {text}", style="red", markup=False)


def _print_trace(trace: dict[str, Any], path: Path) -> None:
    sums = trace.get("otherData")
    click.echo(f"trace of {len(trace['traceEvents']):,} events in {path}; open it in chrome://tracing or Perfetto")
    if sums:
        click.echo(f"the device was busy {sums['device_busy']:.1%} of the time over {sums['steps']:,} steps")


def _milliseconds(values: dict[str, float] | None) -> str:
    if values is None:
        return "–"
    return " / ".join(f"{values[name] * 1000:.1f}" for name in ("p50", "p90", "p99"))


command.add_command(bench_spec.command)

__all__ = ["command"]
