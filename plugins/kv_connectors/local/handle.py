"""The handle of a publication, and whether its KV means the same here."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from engine.specs.kv_connector import KVSchema


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer needs. It passes through clients, so everything in it is checked again by the connection."""

    engine_id: str
    request_id: str
    num_tokens: Annotated[int, msgspec.Meta(gt=0)]
    address: Annotated[str, msgspec.Meta(pattern="^engine-kv-[0-9a-f-]{1,64}$")]
    token: str  # secret, new for each publication
    schema: KVSchema

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any]) -> Handle:
        """Read what `to_json` wrote.

        Raises:
            ValueError: it is something else; the sentence names the field.
        """
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"malformed handle of the local KV connector: {error}") from error


def difference(here: KVSchema, there: KVSchema) -> str | None:
    """Why pages of one engine mean nothing in the other, as a sentence; None if they agree. Pool sizes may differ."""
    differing = [
        f"{name} is {getattr(there, name)!r} there and {getattr(here, name)!r} here"
        for name in ("weights", "layers", "page_size", "parts", "dtype")
        if getattr(there, name) != getattr(here, name)
    ]
    if not differing:
        return None
    return (
        f"the producer's KV can't be used here: {'; '.join(differing)}; "
        "serve the same weights with the same page size, attention backend and dtype on both sides"
    )


__all__ = ["Handle", "difference"]
