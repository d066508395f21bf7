"""Trees of draft tokens: their shape, and what is left of a draft once everything unusable is cut off.

A node is named by its index; `parents[i]` is the node that node i follows, None for the last real token. A chain has
no parents at all: node i follows node i - 1. Pure functions over small lists; knows no model and no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from engine.specs.speculator import Draft

Parents: TypeAlias = Sequence[int | None]


def chain(count: int) -> list[int | None]:
    """The parents of a chain."""
    return [None, *range(count - 1)] if count else []


def depths(parents: Parents) -> list[int]:
    """How many nodes lie above each."""
    found: list[int] = []
    for parent in parents:
        found.append(0 if parent is None else found[parent] + 1)
    return found


def path(parents: Parents, node: int) -> list[int]:
    """The nodes from the root down to a node, itself included."""
    found = [node]
    while (parent := parents[found[-1]]) is not None:
        found.append(parent)
    return found[::-1]


def children(parents: Parents) -> dict[int | None, list[int]]:
    """The nodes that follow each node, in order; those of None follow the last real token."""
    found: dict[int | None, list[int]] = {}
    for node, parent in enumerate(parents):
        found.setdefault(parent, []).append(node)
    return found


def mask(before: int, parents: Parents) -> Tensor:
    """Who sees whom, bool [before + n, before + n]: real tokens what lies before them, nodes all of those and their
    own ancestors; everyone itself."""
    count = before + len(parents)
    sees = torch.zeros(count, count, dtype=torch.bool)
    sees[:, :before] = torch.ones(count, before, dtype=torch.bool).tril_()
    for node, parent in enumerate(parents, before):
        if parent is not None:
            sees[node] |= sees[before + parent]
        sees[node, node] = True
    return sees


def usable(draft: Draft, room: int, vocab_size: int) -> tuple[Draft, str]:
    """What of a draft can be verified: at most `room` nodes, all of them sound. A tree without a fork becomes a chain.

    Returns:
        The draft, and why nodes were left out if they were malformed (too many are not).
    """
    parents = chain(len(draft.tokens)) if draft.parents is None else draft.parents
    if len(parents) != len(draft.tokens):
        return Draft(), f"{len(draft.tokens)} tokens have {len(parents)} parents"
    fault, kept, renamed = "", list[int](), dict[int | None, int | None]({None: None})
    seen: set[tuple[int | None, int]] = set()
    for node, (token, parent) in enumerate(zip(draft.tokens, parents, strict=True)):
        if len(kept) == room:
            break
        if wrong := _unsound(node, token, parent, vocab_size):
            fault = fault or wrong
        elif parent in renamed and (parent, token) not in seen:
            seen.add((parent, token))
            renamed[node] = len(kept)
            kept.append(node)
    shape = [renamed[parents[node]] for node in kept]
    probs = None if draft.probs is None else draft.probs[kept]
    tokens = [int(draft.tokens[node]) for node in kept]
    return Draft(tokens, None if shape == chain(len(kept)) else shape, probs), fault


def best_chain(draft: Draft) -> Draft:
    """The likeliest chain of a tree whose best nodes come first: always the first child."""
    if draft.parents is None:
        return draft
    kept: list[int] = []
    for node, parent in enumerate(draft.parents):
        if parent == (kept[-1] if kept else None):
            kept.append(node)
    return Draft([draft.tokens[node] for node in kept], None, None if draft.probs is None else draft.probs[kept])


def _unsound(node: int, token: int, parent: int | None, vocab_size: int) -> str:
    if not 0 <= token < vocab_size:
        return f"token {token} is outside the vocabulary of {vocab_size}"
    if parent is not None and not 0 <= parent < node:
        return f"node {node} follows node {parent}, which does not come before it"
    return ""


__all__ = ["Parents", "best_chain", "chain", "children", "depths", "mask", "path", "usable"]
