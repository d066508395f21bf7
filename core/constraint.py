"""One constrained request as the runner follows it: which tokens may come next, also behind each of its drafts.

Knows no queue and no device. `masks` is called once a step, on the thread that fills masks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from engine.specs.grammar import Matcher, TokenTable
from engine.specs.speculator import Draft
from engine.trees import chain, children

Mask = NDArray[np.int32]
"""[words]: bit `i % 32` of word `i // 32` says whether token i may come."""


class Constraint:
    """Follows the output of one request from its first token on.

    Args:
        matcher: at the beginning of a text; it becomes the constraint's own.
        start: position of the first output token.
        tokens: the vocabulary.
        after: the constraint begins behind this text; empty for at once.
        ignore_eos: no end token may come as long as anything else may.
    """

    def __init__(
        self, matcher: Matcher, start: int, tokens: TokenTable, *, after: str = "", ignore_eos: bool = False
    ) -> None:
        self._matcher, self._tokens, self._after, self._ignore_eos = matcher, tokens, after.encode(), ignore_eos
        self._at = start  # position behind the last token that was taken
        self._free = bool(after)
        self._tail = b""  # while free: the last bytes, which may begin `after`

    def masks(self, tokens: NDArray[np.int64], first: int, draft: Draft) -> list[Mask | None]:
        """What may stand at `first`, and behind each node of a draft that itself may stand where it does.

        None in front of `after`, where anything may, and behind nodes that may not stand, since they are rejected.

        Args:
            tokens: the request's tokens; those before `first` are final.
            draft: follows them.

        Raises:
            ValueError: the text so far breaks the constraint, or a limit of the grammar was passed.
        """
        for token in tokens[self._at : first].tolist():
            if not self._take(token):
                raise ValueError(f"token {token} at position {self._at} breaks the form that was asked for")
            self._at += 1
        found: list[Mask | None] = [self._mask(), *(None for _ in draft.tokens)]
        if draft.tokens:
            below = children(chain(len(draft.tokens)) if draft.parents is None else draft.parents)
            self._visit(None, draft.tokens, below, found)
        return found

    def _visit(
        self,
        node: int | None,
        tokens: Sequence[int],
        below: Mapping[int | None, Sequence[int]],
        found: list[Mask | None],
    ) -> None:
        """Fill in the masks behind the nodes under one, which was taken; afterwards the constraint stands as before."""
        free, tail = self._free, self._tail
        for child in below.get(node, ()):
            if self._take(tokens[child]):
                found[child + 1] = self._mask()
                self._visit(child, tokens, below, found)
                if not free:
                    self._matcher.rollback(1)
            self._free, self._tail = free, tail

    def _mask(self) -> Mask | None:
        if self._free:
            return None
        mask = np.zeros(self._tokens.words, dtype=np.int32)
        self._matcher.fill(mask)
        if not mask.any():
            raise ValueError("no token can continue the text in the form that was asked for")
        return self._going_on(mask) if self._ignore_eos else mask

    def _going_on(self, mask: Mask) -> Mask:
        """The mask without end tokens, unless nothing else is left."""
        rest = mask.view(np.uint32).copy()
        for token in self._tokens.ends:
            rest[token // 32] &= ~np.uint32(1 << token % 32)
        return rest.view(np.int32) if rest.any() else mask

    def _take(self, token: int) -> bool:
        if not self._free:
            return self._matcher.accept(token)
        self._tail += self._tokens.tokens[token]
        self._free = self._after not in self._tail
        self._tail = self._tail[-len(self._after) :] if self._free else b""
        return True


__all__ = ["Constraint", "Mask"]
