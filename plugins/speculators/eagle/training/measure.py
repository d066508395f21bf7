"""The evaluation at the end of training: acceptance length per head, class of prompts and context."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.errors import ConfigError
from engine.plugins.speculators.eagle.training.config import EvaluationSection
from engine.plugins.speculators.eagle.training.dataset import Document
from engine.plugins.speculators.eagle.training.evaluation import Exercise, acceptance, agreements, read_exercises
from engine.plugins.speculators.eagle.training.openings import read_texts, scripts_of
from engine.plugins.speculators.eagle.training.student import Student
from engine.plugins.speculators.eagle.training.target import Target
from engine.plugins.speculators.eagle.training.trainer import states_of
from engine.plugins.speculators.eagle.training.writing import ASSISTANT, Opening, Writer

HELD = 32
"""Held-back documents that are looked at where there is no file of prompts."""


class Measured(NamedTuple):
    """One cell of the table."""

    head: str
    kind: str
    context: int  # tokens before the answer
    tokens: int
    passes: int  # of the target

    @property
    def length(self) -> float:
        """Tokens per pass of the target, its own token included."""
        return self.tokens / self.passes if self.passes else float("nan")


class _Answer(NamedTuple):
    kind: str
    context: int
    tokens: np.ndarray  # int32 [T]
    start: int
    end: int


def measure(
    target: Target,
    students: Sequence[Student],
    taps: Sequence[int],
    section: EvaluationSection,
    held: Sequence[Document],
) -> list[Measured]:
    """Every head on every class and context."""
    answers = list(_answers(target, section)) if section.prompts else list(_held(held))
    dtype, sums = getattr(torch, target.composition.dtype), dict[tuple[str, str, int], tuple[int, int]]()
    for answer in answers:
        states = states_of(target, answer.tokens[None], taps)
        tokens = torch.from_numpy(answer.tokens)[None].to(target.device).long()
        for student in students:
            found = agreements(student.head, states, tokens, section.draft, dtype)[0].tolist()
            more = acceptance(found, answer.start, answer.end, section.draft)
            key = student.name, answer.kind, answer.context
            before = sums.get(key, (0, 0))
            sums[key] = before[0] + more[0], before[1] + more[1]
    return [Measured(*key, *counts) for key, counts in sums.items()]


def _held(documents: Sequence[Document]) -> Iterator[_Answer]:
    """The last run of taught tokens in each held-back document; most of them were drawn, not greedy."""
    for document in documents[:HELD]:
        places = np.flatnonzero(document.taught)
        if len(places) > 8:
            breaks = np.flatnonzero(np.diff(places) > 1)
            first = int(places[breaks[-1] + 1] if len(breaks) else places[0])
            yield _Answer("held back", 0, document.tokens, first, int(places[-1]) + 1)


def _answers(target: Target, section: EvaluationSection) -> Iterator[_Answer]:
    """The target's greedy answers, at each context."""
    assert section.prompts is not None
    exercises = read_exercises(section.prompts)
    filler = target.tokenizer.encode("\n\n".join(read_texts("evaluation.filler", section.filler)))
    for context in section.contexts:
        openings = [_opening(target, exercise, filler, context) for exercise in exercises]
        rows = len(openings)
        written = Writer(
            target,
            openings,
            scripts_of(target.tokenizer),
            torch.zeros(rows, 2),
            torch.full((rows, 2), section.tokens),
            steps=section.tokens,
            seed=0,
            graph=target.device.type == "cuda",
        ).write()
        for row, exercise in enumerate(exercises):
            start = int(written.starts[row])
            spoken = written.spoken[row, start:]
            end = start + (int(np.argmin(spoken)) if not spoken.all() else len(spoken))
            yield _Answer(exercise.kind, context, written.tokens[row, :end], start, end)


def _opening(target: Target, exercise: Exercise, filler: Sequence[int], context: int) -> Opening:
    """The prompt behind so much other text that the answer begins at about `context`."""
    tokenizer = target.tokenizer
    mark = "FILLERMARK"
    text = tokenizer.apply_chat_template([{"role": "user", "content": f"{mark}{exercise.prompt}"}])
    before, _, after = text.partition(mark)
    head, tail, gap = tokenizer.encode(before), tokenizer.encode(after), tokenizer.encode("\n\n")
    room = context - len(head) - len(tail) - len(gap)
    if room <= 0 or not filler:
        return Opening(tokens=[*head, *tail], speaker=ASSISTANT)
    if room > len(filler):
        raise ConfigError(f"evaluation.filler has {len(filler):,} tokens, too few for a context of {context:,}")
    return Opening(tokens=[*head, *filler[:room], *gap, *tail], speaker=ASSISTANT)


__all__ = ["Measured", "measure"]
