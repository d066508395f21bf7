"""The command `engine train`: shows how far training is, and the table at its end."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.config.load import load_tree
from engine.plugins.speculators.eagle.training.config import TrainConfig

if TYPE_CHECKING:
    from engine.plugins.speculators.eagle.training.measure import Measured
    from engine.plugins.speculators.eagle.training.run import Watchers


@click.group("train")
def group() -> None:
    """Train the small models that draft for a large one."""


@group.command("eagle")
@click.argument("config", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change one value of CONFIG; repeatable.")
def eagle(config: Path, overrides: Sequence[str]) -> None:
    """Train EAGLE-3 or EAGLE-3.1 heads as CONFIG says.

    The target writes its own training text, then the heads learn to guess it. Run again with the same CONFIG, the
    command goes on from the checkpoint in `output`.

    \b
    engine train eagle head.yaml
    engine train eagle head.yaml --set training.minutes=5 --set data.tokens=1000000
    """
    from engine.plugins.speculators.eagle.training.run import open_target, train

    loaded, _ = load_tree(TrainConfig, config, overrides)
    click.echo("loading the target", err=True)
    target = open_target(loaded)
    with _progress() as watch:
        measured = train(loaded, target, watch)
    print_table(measured, loaded.evaluation.draft)
    for name in loaded.heads:
        click.echo(f"wrote {loaded.output / name}; serve it with speculator: {{use: eagle, options: {{head: …}}}}")


@contextmanager
def _progress() -> Iterator[Watchers]:
    """Two bars on stderr; where that is no terminal, a line now and then."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    from engine.plugins.speculators.eagle.training.run import Watchers

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.fields[words]}"), console=console, refresh_per_second=2) as progress:
        writing = progress.add_task("writing text", total=1.0, words="")
        training = progress.add_task("training", total=1.0, words="", start=False)
        last = -1.0

        def wrote(share: float, words: str) -> None:
            progress.update(writing, completed=share, words=words)

        def trained(step: int, share: float, heads: Mapping[str, tuple[float, Sequence[float]]]) -> None:
            nonlocal last
            progress.start_task(training)
            words = f"step {step}  " + "  ".join(_learnt(name, *found) for name, found in heads.items())
            progress.update(training, completed=share, words=words)
            if not console.is_terminal and share - last >= 0.02:
                last = share
                console.print(f"{share:4.0%} {words}", highlight=False)

        yield Watchers(writing=wrote, training=trained, said=lambda words: console.print(words, highlight=False))
        progress.update(writing, completed=1.0)
        progress.update(training, completed=1.0)


def _learnt(name: str, loss: float, right: Sequence[float]) -> str:
    """A head's loss, and how often the first choice of each step was the target's."""
    return f"{name}: loss {loss:.2f}, right {' '.join(f'{share:.0%}' for share in right)}"


def print_table(measured: Sequence[Measured], draft: int) -> None:
    """Acceptance length: a row per head and class of prompts, a column per context."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"tokens per pass of the target, chains of {draft} draft tokens, greedy")
    contexts = sorted({cell.context for cell in measured})
    for name in ("head", "prompts", *(f"at {context:,}" if context else "as they are" for context in contexts)):
        table.add_column(name, justify="left" if name in ("head", "prompts") else "right")
    for head, kind, found in _rows(measured):
        table.add_row(head, kind, *(f"{found[context]:.2f}" if context in found else "" for context in contexts))
    Console(width=100).print(table)


def _rows(measured: Sequence[Measured]) -> Iterator[tuple[str, str, dict[int, float]]]:
    """Each head's classes, then all of them together."""
    rows: dict[tuple[str, str], dict[int, tuple[int, int]]] = defaultdict(lambda: defaultdict(lambda: (0, 0)))
    for cell in measured:
        for kind in (cell.kind, "all"):
            tokens, passes = rows[cell.head, kind][cell.context]
            rows[cell.head, kind][cell.context] = tokens + cell.tokens, passes + cell.passes
    for (head, kind), found in sorted(rows.items(), key=lambda row: (row[0][0], row[0][1] == "all", row[0][1])):
        yield head, kind, {context: tokens / max(passes, 1) for context, (tokens, passes) in found.items()}


__all__ = ["group"]
