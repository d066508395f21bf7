"""`engine bench spec`: what speculators bring on this machine, as two tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from engine.server.cli.parameters import config_argument, set_option
from engine.server.cli.spec_runs import TASKS, Acceptance, Speed, acceptance, drafter_of, speeds
from engine.server.cli.table import table

if TYPE_CHECKING:
    from engine.llm import LLM


def _numbers(least: int) -> Callable[[click.Context, click.Parameter, str], list[int]]:
    def parse(context: click.Context, option: click.Parameter, value: str) -> list[int]:
        try:
            found = [int(part) for part in value.split(",")]
        except ValueError:
            found = [least - 1]
        if min(found) < least:
            raise click.BadParameter(f"give whole numbers from {least} on, such as 1,16,64")
        return found

    return parse


@click.command("spec")
@config_argument
@set_option
@click.option("--speculator", "names", multiple=True, help="Which to measure; repeatable. Else the configuration's.")
@click.option("--prompts", type=click.Path(path_type=Path, exists=True), help='JSON lines of {"class", "prompt"}.')
@click.option("--context", "contexts", default="0", callback=_numbers(0), help="Tokens to fill prompts up to: N[,N…].")
@click.option("--batch", "batches", default="1,4,16,64", callback=_numbers(1), help="Requests at once: N[,N…].")
@click.option("--rounds", default=3, type=click.IntRange(1), show_default=True, help="Measured rounds of each batch.")
@click.option("--max-tokens", default=128, type=click.IntRange(1), show_default=True, help="Tokens in an answer.")
@click.option("--only", type=click.Choice(["acceptance", "speed"]), help="One of the two tables.")
@click.option("--trace", is_flag=True, help="Print what the controller decided while speed was measured, and why.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write all numbers here.")
def command(
    config: Path | None,
    overrides: Sequence[str],
    names: Sequence[str],
    prompts: Path | None,
    json_path: Path | None,
    trace: bool,
    **load: Any,
) -> None:
    """Measure speculators: how many draft tokens are kept, and what that does to tokens per second.

    \b
    engine bench spec --speculator ngram --speculator suffix
    engine bench spec engine.yaml --batch 1,16 --context 256,4096 --trace
    """
    from engine.errors import ConfigError
    from engine.llm import LLM

    tasks = _tasks(prompts) if prompts else TASKS
    kept: list[Acceptance] = []
    fast: list[Speed] = []
    turns: dict[str, list[dict[str, Any]]] = {}
    for name in names or (None,):
        chosen = [] if name is None else [f"speculator.use={name}"]
        with LLM(config, ["logging.level=warning", *overrides, *chosen]) as llm:
            try:
                drafter = drafter_of(llm)
            except ValueError as error:
                raise ConfigError(str(error)) from None
            _measure(llm, tasks, kept, fast, **load)
            turns[drafter.name] = drafter.lengths.turns()
    _print(kept, fast)
    if trace:
        _print_turns(turns)
    if json_path is not None:
        data = {"acceptance": [asdict(a) for a in kept], "speed": [asdict(s) for s in fast], "turns": turns}
        json_path.write_bytes(msgspec.json.format(msgspec.json.encode(data), indent=2) + b"\n")


def _tasks(path: Path) -> Mapping[str, Sequence[str]]:
    tasks: dict[str, list[str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = msgspec.json.decode(line, type=dict[str, str])
            tasks.setdefault(row["class"], []).append(row["prompt"])
        except (msgspec.MsgspecError, KeyError):
            raise click.BadParameter(f'line {number} of {path} is no {{"class": TEXT, "prompt": TEXT}}') from None
    return tasks


def _measure(
    llm: LLM,
    tasks: Mapping[str, Sequence[str]],
    kept: list[Acceptance],
    fast: list[Speed],
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    rounds: int,
    max_tokens: int,
    only: str | None,
) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    texts = [text for row in zip(*tasks.values(), strict=False) for text in row]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), refresh_per_second=4) as progress:
        if only != "speed":
            bar = progress.add_task(f"{drafter_of(llm).name}: acceptance", total=len(tasks) * len(contexts))
            kept += acceptance(llm, tasks, contexts, max_tokens, lambda: progress.advance(bar))
        if only != "acceptance":
            bar = progress.add_task(f"{drafter_of(llm).name}: speed", total=2 * len(batches) * (rounds + 1))
            fast += speeds(llm, texts, batches, rounds, max_tokens, lambda: progress.advance(bar))


def _print(kept: Sequence[Acceptance], fast: Sequence[Speed]) -> None:
    if kept:
        click.echo("Acceptance: tokens per verified draft, the model's own included; drafts as long as they may be.\n")
        columns = ("SPECULATOR", "TASK", "CONTEXT", "DRAFTS", "TOKENS", "KEPT", "LENGTH")
        click.echo(table(columns, map(_kept_row, kept)) + "\n")
    if fast:
        click.echo("Speed: tokens per second, in turns without and with drafts; medians of the rounds.\n")
        headers = ("SPECULATOR", "BATCH", "WITHOUT", "WITH", "RATIO", "CONTROLLER")
        click.echo(table(headers, map(_speed_row, fast)) + "\n")


def _kept_row(row: Acceptance) -> tuple[str, ...]:
    kept = "–" if row.rate is None else f"{row.rate:.0%}"
    length = "–" if row.length is None else f"{row.length:.2f}"
    context = str(row.context) if row.context else "as it is"
    return row.speculator, row.task, context, str(row.drafts), str(row.drafted), kept, length


def _speed_row(row: Speed) -> tuple[str, ...]:
    from statistics import median

    plain, drafted = median(row.plain), median(row.drafted)
    return row.speculator, str(row.batch), f"{plain:.1f}", f"{drafted:.1f}", f"{row.ratio:.2f}", row.state


def _print_turns(turns: Mapping[str, Sequence[Mapping[str, Any]]]) -> None:
    for name, rows in turns.items():
        click.echo(f"Controller of {name}: the latest {len(rows)} decisions\n\n{turns_table(rows)}\n")


def turns_table(turns: Sequence[Mapping[str, Any]]) -> str:
    """The controller's decisions for people."""
    headers = ("STEP", "REQUESTS", "STATE", "GAIN", "KEPT", "PAYS FROM", "ACCOUNT", "WHY")
    return table(headers, map(_turn_row, turns))


def _turn_row(turn: Mapping[str, Any]) -> tuple[str, ...]:
    shares = ("–" if turn[name] is None else f"{turn[name]:.2f}" for name in ("acceptance", "break_even"))
    gain, balance = f"{turn['gain']:.2f}", f"{turn['balance']:.2f}"
    return str(turn["step"]), str(turn["rows"]), turn["state"], gain, *shares, balance, turn["why"]


__all__ = ["command", "turns_table"]
