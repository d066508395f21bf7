"""Training text as tokens: documents, rows of one length made of them, and a file that keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from engine.errors import ResourceError

RUN: Final = 8
"""Tokens that count as a repeated run."""

_FACTORS: Final = np.random.default_rng(8).integers(1, 2**63, RUN + 1, dtype=np.uint64) | np.uint64(1)
"""Of a hash of runs; the first is for their document."""


class Document(NamedTuple):
    """One text."""

    tokens: np.ndarray  # int32 [T]
    taught: np.ndarray  # bool [T], tokens that the target wrote in the role that is served


class Rows(NamedTuple):
    """Documents one behind the other, cut into rows of one length."""

    tokens: np.ndarray  # int32 [R, length]
    taught: np.ndarray  # bool [R, length]


def pack(documents: Sequence[Document], length: int) -> Rows:
    """Rows of `length` tokens. Whole rows of one document first; what is left of each document is put behind each other
    and cut, so that long rows hold several: a head learns to draft far from the start of a context, although few
    documents are so long. The last, incomplete row is left out."""
    whole, rest = list[Document](), list[Document]()
    for tokens, taught in documents:
        end = len(tokens) // length * length
        whole.append(Document(tokens[:end], taught[:end]))
        rest.append(Document(tokens[end:], taught[end:]))
    parts = [*whole, *rest]
    tokens = np.concatenate([np.zeros(0, np.int32), *(part.tokens for part in parts)])
    taught = np.concatenate([np.zeros(0, bool), *(part.taught for part in parts)])
    count = len(tokens) // length
    return Rows(tokens[: count * length].reshape(count, length), taught[: count * length].reshape(count, length))


def frequent(documents: Sequence[Document], vocab: int, count: int) -> np.ndarray:
    """int64 [count], ascending: the ids that are taught most often, of equals the lower ones."""
    said = np.concatenate([document.tokens[document.taught] for document in documents])
    seen = np.bincount(said, minlength=vocab)
    return np.sort(np.argsort(-seen, kind="stable")[:count])


def save(path: Path, documents: Sequence[Document]) -> None:
    """Write all to one file."""
    tokens, taught = (np.concatenate(part) for part in zip(*documents, strict=True))
    lengths = np.array([len(document.tokens) for document in documents])
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, tokens=tokens, taught=np.packbits(taught), lengths=lengths)


def load(path: Path) -> list[Document]:
    """Read what `save` wrote.

    Raises:
        ResourceError: the file is something else.
    """
    try:
        with np.load(path, allow_pickle=False) as file:
            tokens, lengths = file["tokens"], file["lengths"]
            taught = np.unpackbits(file["taught"], count=len(tokens)).astype(bool)
    except (OSError, ValueError, KeyError) as error:
        raise ResourceError(f"{path} holds no training text: {error}; delete it to have the target write one") from None
    ends = np.cumsum(lengths)
    return [Document(tokens[e - n : e], taught[e - n : e]) for n, e in zip(lengths, ends, strict=True)]


def without_repeats(documents: Sequence[Document], times: int) -> list[Document]:
    """The documents with nothing taught at the end of RUN tokens that stood in the same one `times` times before: a
    small model often ends in a loop, which is easy to guess and says little about other text."""
    tokens = np.concatenate([document.tokens for document in documents]).astype(np.uint64)
    ends = np.cumsum([len(document.tokens) for document in documents])
    owner = np.repeat(np.arange(len(documents), dtype=np.uint64), np.diff([0, *ends]))
    hashes = owner * _FACTORS[0]
    for back, factor in enumerate(_FACTORS[1:]):
        hashes[back:] += tokens[: len(tokens) - back] * factor  # what is left at the front is a run of its own
    order = np.argsort(hashes, kind="stable")
    firsts = np.flatnonzero(np.concatenate(([True], np.diff(hashes[order]) != 0)))
    before = np.empty(len(hashes), dtype=np.int64)
    before[order] = np.arange(len(hashes)) - np.repeat(firsts, np.diff([*firsts, len(hashes)]))
    fresh = np.split(before < times, ends[:-1])
    return [Document(d.tokens, d.taught & new) for d, new in zip(documents, fresh, strict=True)]


class Batch(NamedTuple):
    """Some rows of one length."""

    tokens: np.ndarray  # int32 [B, length]
    taught: np.ndarray  # bool [B, length]


class Batches:
    """Batches of about `tokens` tokens each from rows of several lengths, in an order that the seed fixes.

    Step n's batch depends on nothing but n, so that training can go on where it stopped.
    """

    def __init__(self, rows: Sequence[Rows], tokens: int, seed: int) -> None:
        self._rows, self._seed = [some for some in rows if len(some.tokens)], seed
        self._sizes = [max(1, tokens // some.tokens.shape[1]) for some in self._rows]
        self.per_epoch = len(self._epoch(0))
        self._cached: tuple[int, list[tuple[int, np.ndarray]]] = (-1, [])

    def at(self, step: int) -> Batch:
        """The batch of one step."""
        epoch, within = divmod(step, self.per_epoch)
        if self._cached[0] != epoch:
            self._cached = epoch, self._epoch(epoch)
        kind, chosen = self._cached[1][within]
        return Batch(self._rows[kind].tokens[chosen], self._rows[kind].taught[chosen])

    def _epoch(self, number: int) -> list[tuple[int, np.ndarray]]:
        """Which rows each batch takes: all once, a rest that fills no batch excepted, unless there is only that."""
        draws = np.random.default_rng((self._seed, number))
        batches = [batch for kind in range(len(self._rows)) for batch in self._cut(kind, draws)]
        return [batches[i] for i in draws.permutation(len(batches))]

    def _cut(self, kind: int, draws: np.random.Generator) -> Iterator[tuple[int, np.ndarray]]:
        order, size = draws.permutation(len(self._rows[kind].tokens)), self._sizes[kind]
        for at in range(0, max(len(order) - size, 0) + 1, size):
            yield kind, order[at : at + size]


__all__ = ["Batch", "Batches", "Document", "Rows", "frequent", "load", "pack", "save", "without_repeats"]
