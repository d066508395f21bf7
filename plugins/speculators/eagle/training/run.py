"""The whole of `engine train eagle`: text, heads, training, evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.compose import compose, resolve_source
from engine.device import detect
from engine.errors import ConfigError, ResourceError
from engine.plugins.speculators.eagle.files import HeadWeights, weight_file
from engine.plugins.speculators.eagle.training.checks import check, described
from engine.plugins.speculators.eagle.training.config import TrainConfig
from engine.plugins.speculators.eagle.training.dataset import Batches, Document, Rows, frequent, pack, without_repeats
from engine.plugins.speculators.eagle.training.measure import Measured, measure
from engine.plugins.speculators.eagle.training.student import Student
from engine.plugins.speculators.eagle.training.target import Target
from engine.plugins.speculators.eagle.training.text import Progress, training_text
from engine.plugins.speculators.eagle.training.trainer import Report, Trainer
from engine.registry import Registry

HELD_BACK = 50
"""One document of so many is kept for the evaluation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Watchers:
    """Who is told what goes on."""

    writing: Progress = lambda share, words: None
    training: Report = lambda step, share, heads: None
    said: Callable[[str], None] = lambda words: None


def open_target(config: TrainConfig, registry: Registry | None = None) -> Target:
    """The composed target with its weights in memory.

    Raises:
        EngineError: the parts don't fit, or a file is missing.
    """
    engine = config.target
    plugins = registry or Registry.discover(engine.plugins.allow, engine.plugins.deny)
    files = resolve_source(engine, plugins, lambda share, words: None)
    composition = compose(engine, plugins, detect(engine.device.kind), files.path)
    try:
        return Target(composition)
    except (OSError, ValueError, KeyError) as error:
        raise ResourceError(f"the target at {files.path} can't be loaded: {error}") from error


def train(config: TrainConfig, target: Target, watch: Watchers) -> list[Measured]:
    """Train and write all heads; returns how they did.

    Raises:
        EngineError: the configuration or a file is of no use.
    """
    check(config, target)
    documents = training_text(target, config.data, watch.writing)
    held = documents[::HELD_BACK]
    learnt = [document for i, document in enumerate(documents) if i % HELD_BACK]
    if times := config.data.repeats:
        learnt = without_repeats(learnt, times)
    ids = vocabulary(config, target, learnt)
    watch.said(f"{covered(held, ids):.1%} of what the target says is in the draft vocabulary of {len(ids):,}")
    on_device = torch.from_numpy(ids).to(target.device)
    students, taps = make_students(config, target, on_device)
    batches = Batches(rows_of(learnt, config.training.contexts), config.training.batch_tokens, config.training.seed)
    trainer = Trainer(
        target,
        students,
        batches,
        config.training,
        taps=taps,
        ids=on_device,
        checkpoint=config.output / "checkpoint.safetensors",
    )
    try:
        trainer.run(watch.training)
    finally:
        for student in students:
            student.write(config.output / student.name)
    return measure(target, students, taps, config.evaluation, held)


def vocabulary(config: TrainConfig, target: Target, documents: Sequence[Document]) -> np.ndarray:
    """int64 [draft_vocab], ascending: of the head that training goes on from, or else what is said most often."""
    starts = {name: section.start for name, section in config.heads.items() if section.start}
    if not starts:
        size = target.profile.vocab_size
        return frequent(documents, size, min(config.draft_vocab, size))
    found = []
    for name, start in starts.items():
        try:
            with closing(HeadWeights(weight_file(start))) as source:
                offsets = source.get("d2t", torch.int64).numpy()
        except (ValueError, KeyError, OSError) as error:
            raise ConfigError(f"heads.{name}.start: {error}") from None
        found.append(offsets + np.arange(len(offsets)))
    if any(not np.array_equal(found[0], other) for other in found[1:]):
        raise ConfigError("the heads to go on from have different draft vocabularies; train them one after the other")
    return found[0]


def covered(documents: Iterable[Document], ids: np.ndarray) -> float:
    """The share of taught tokens that are among `ids`."""
    said = np.concatenate([document.tokens[document.taught] for document in documents])
    return float(np.isin(said, ids).mean()) if len(said) else 0.0


def make_students(config: TrainConfig, target: Target, ids: Tensor) -> tuple[list[Student], tuple[int, ...]]:
    """The heads, untrained, and the layers that they all watch."""
    torch.manual_seed(config.training.seed)
    dtype = getattr(torch, target.composition.dtype)
    students, taps = [], set()
    for name, section in config.heads.items():
        made, layers = described(config, target, name, len(ids))
        taps.add(layers)
        students.append(Student(name, section, made, ids, dtype))
        if section.start is not None:
            try:
                students[-1].go_on(section.start)
            except (ValueError, KeyError, OSError) as error:
                raise ConfigError(f"heads.{name}.start: {error}") from None
    (watched,) = taps
    return students, watched


def rows_of(documents: Sequence[Document], contexts: Sequence[int]) -> list[Rows]:
    """Rows of every length: long documents go to the longest, the others to each in turn."""
    longest, turns = max(contexts), list[list[Document]]([[] for _ in contexts])
    for number, document in enumerate(documents):
        long = len(document.tokens) > 2 * min(contexts)
        turns[contexts.index(longest) if long else number % len(contexts)].append(document)
    rows = [pack(some, length) for some, length in zip(turns, contexts, strict=True)]
    if not any(len(some.tokens) for some in rows):
        total = sum(len(document.tokens) for document in documents)
        raise ConfigError(f"{total:,} tokens of text fill no row of training.contexts; have more text, or shorter rows")
    return rows


__all__ = ["Watchers", "make_students", "open_target", "train", "vocabulary"]
