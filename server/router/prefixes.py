"""Which engine has seen the beginning of a prompt: hashes over blocks of text, each over all blocks before it.

Text and not tokens: the router has no tokenizer, and equal text makes equal tokens.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

_ORDER: Final = ("system", "instructions", "tools", "messages", "prompt", "input")
"""Fields that the model reads, in about the order in which chat templates write them."""


def prompt_text(body: Mapping[str, Any]) -> bytes:
    """What a request has the model read, so that a longer conversation begins with the bytes of a shorter one."""
    return msgspec.json.encode([body[name] for name in _ORDER if body.get(name) is not None])


def chain(text: bytes, block: int, owner: bytes) -> tuple[bytes, ...]:
    """One hash for every whole block of `block` bytes.

    Args:
        owner: whose prompt it is; nobody finds another's, as in the engines' caches.
    """
    last, made = hashlib.blake2b(owner, digest_size=8).digest(), []
    for at in range(0, len(text) - block + 1, block):
        last = hashlib.blake2b(text[at : at + block], digest_size=8, key=last).digest()
        made.append(last)
    return tuple(made)


class Seen:
    """The blocks that one engine was sent lately; the oldest are forgotten."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def matched(self, blocks: Sequence[bytes]) -> int:
        """How many blocks from the first on were seen."""
        return next((i for i, block in enumerate(blocks) if block not in self._blocks), len(blocks))

    def add(self, blocks: Sequence[bytes]) -> None:
        """Remember a prompt; its beginning longest, for without it the rest is not found."""
        for block in reversed(blocks):
            self._blocks[block] = None
            self._blocks.move_to_end(block)
        while len(self._blocks) > self._most:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        """The engine has started anew."""
        self._blocks.clear()


__all__ = ["Seen", "chain", "prompt_text"]
