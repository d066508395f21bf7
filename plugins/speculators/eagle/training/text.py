"""The training text: read from its file, or written by the target in rounds of conversations and documents."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import torch

from engine.plugins.speculators.eagle.training.config import DataSection
from engine.plugins.speculators.eagle.training.dataset import Document, load, save
from engine.plugins.speculators.eagle.training.openings import Openings, read_texts, scripts_of
from engine.plugins.speculators.eagle.training.target import Target
from engine.plugins.speculators.eagle.training.writing import Opening, Writer, Written

Progress = Callable[[float, str], None]
"""The share that is done, and a few words."""


def training_text(target: Target, section: DataSection, progress: Progress) -> list[Document]:
    """The documents, in the order they were written."""
    if section.file is not None and section.file.exists():
        return load(section.file)
    documents = list(_written(target, section, progress))
    target.release()  # training has far fewer rows
    if section.file is not None:
        save(section.file, documents)
    return documents


def _written(target: Target, section: DataSection, progress: Progress) -> Iterator[Document]:
    began, done, number = time.monotonic(), 0, 0
    questions = [line for text in read_texts("data.questions", section.questions) for line in text.splitlines()]
    openings = Openings(target.tokenizer, read_texts("data.texts", section.texts), section.seed, questions)

    def share() -> float:
        minutes = (time.monotonic() - began) / 60
        return max(done / section.tokens, minutes / section.minutes if section.minutes else 0.0)

    while share() < 1:
        for written in _round(target, section, openings, number):
            done += written.steps * len(written.starts)
            yield from _documents(written)
            progress(min(share(), 1.0), f"{done:,} tokens")
        number += 1


def _round(target: Target, section: DataSection, openings: Openings, number: int) -> Iterator[Written]:
    chats, documents = section.chats, section.documents
    if chats.rows:
        begun = openings.conversations(chats.rows, chats.piece_share, chats.question_share)
        yield _write(target, section, begun, chats.tokens, 2 * number)
    if documents.rows and number % documents.every == 0:
        begun = openings.documents(documents.rows, documents.context)
        yield _write(target, section, begun, documents.tokens, 2 * number + 1)


def _write(target: Target, section: DataSection, begun: Sequence[Opening], tokens: int, number: int) -> Written:
    chats, draws = section.chats, torch.Generator().manual_seed(section.seed * 1_000_003 + number)
    greedy = torch.rand(len(begun), generator=draws) < chats.greedy_share
    drawn = 0.3 + 0.7 * torch.rand(len(begun), generator=draws)
    temperatures = torch.stack((torch.ones(len(begun)), torch.where(greedy, 0.0, drawn)), 1)
    limits = torch.tensor([[chats.user_turn, chats.assistant_turn]]).repeat(len(begun), 1)
    return Writer(
        target,
        begun,
        scripts_of(target.tokenizer),
        temperatures,
        limits,
        steps=tokens,
        seed=section.seed * 1_000_003 + number,
        graph=target.device.type == "cuda",
    ).write()


def _documents(written: Written) -> Iterator[Document]:
    for tokens, spoken, start in zip(written.tokens, written.spoken, written.starts, strict=True):
        yield Document(tokens[: start + written.steps], spoken[: start + written.steps])


__all__ = ["Progress", "training_text"]
