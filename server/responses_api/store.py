"""Answers kept in memory, so that a later request can go on from one, or fetch it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.server.errors import ApiError


@dataclass(frozen=True, slots=True)
class Kept:
    """One answer, as JSON texts: what its client got, and the conversation that ends with it."""

    owner: str  # name of the key that it was made for
    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.response) + len(self.items)


class ResponseStore:
    """At most `limit` bytes of answers; the ones that were not used for longest go first.

    An answer is known to the key that it was made for, and to nobody else.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._size = 0

    def put(self, owner: str, response: dict[str, Any], items: Sequence[dict[str, Any]]) -> None:
        """Keep an answer under its id, in the place of an earlier state of it."""
        name = response["id"]
        self._drop(name)
        kept = Kept(owner, msgspec.json.encode(response), msgspec.json.encode(items))
        self._kept[name] = kept
        self._size += kept.size
        while self._size > self._limit:
            self._drop(next(iter(self._kept)))

    def response(self, owner: str, name: str) -> bytes:
        """An answer's JSON text. Raises a 404 for one that isn't kept."""
        return self._find(owner, name, "response_id").response

    def items(self, owner: str, name: str) -> list[dict[str, Any]]:
        """The conversation up to and with an answer. Raises a 404 for one that isn't kept."""
        found: list[dict[str, Any]] = msgspec.json.decode(self._find(owner, name, "previous_response_id").items)
        return found

    def delete(self, owner: str, name: str) -> None:
        """Forget an answer. Raises a 404 for one that isn't kept."""
        self._find(owner, name, "response_id")
        self._drop(name)

    def _find(self, owner: str, name: str, param: str) -> Kept:
        kept = self._kept.get(name)
        if kept is None or kept.owner != owner:
            message = f"there is no response {name!r} here; it was not stored, or has made room for later ones"
            raise ApiError(404, message, param=param)
        self._kept.move_to_end(name)
        return kept

    def _drop(self, name: str) -> None:
        if (kept := self._kept.pop(name, None)) is not None:
            self._size -= kept.size


__all__ = ["ResponseStore"]
