"""Whether the KV of one engine means something in another, and the blocks into which both cut their pages.

A block is as many tokens as divide the page sizes of both engines; its bytes stand in one order, whatever the pages are
like. Where the page sizes agree, a block is a page, and nobody needs to know what is inside. Where they differ, `axes`
tells which dimension of a page counts its tokens: what stands before it (the heads, say) is repeated for each block.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, NamedTuple

import msgspec

from engine.specs.kv_connector import TOKENS, KVSchema


class Cut(NamedTuple):
    """How pages of one part fall into blocks."""

    outer: int
    """Runs of bytes in a block: the dimensions before the tokens."""
    per_page: int
    """Blocks in a page."""


class Handle(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a consumer needs. It passes through clients, so everything in it is checked again by the connection."""

    engine_id: str
    request_id: str
    num_tokens: Annotated[int, msgspec.Meta(gt=0)]
    address: str
    token: str  # secret, new for each publication
    schema: KVSchema

    def to_json(self) -> dict[str, Any]:
        """As plain JSON values."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    @classmethod
    def from_json(cls, plain: dict[str, Any], connector: str) -> Handle:
        """Read what `to_json` wrote; `connector` is for the sentence.

        Raises:
            ValueError: it is something else; the sentence names the field.
        """
        try:
            return msgspec.convert(plain, cls)
        except msgspec.ValidationError as error:
            raise ValueError(f"malformed handle of the {connector} KV connector: {error}") from error


def common_block(here: KVSchema, there: KVSchema) -> int:
    """Tokens in the largest block that both cut their pages into."""
    return math.gcd(here.page_size, there.page_size)


def cuts(schema: KVSchema, block: int) -> list[Cut]:
    """How each part's pages fall into blocks of `block` tokens.

    Raises:
        ValueError: they don't; the sentence says why.
    """
    if block == schema.page_size:
        return [Cut(1 if not schema.axes else _outer(schema, i), 1) for i in range(len(schema.parts))]
    if block <= 0 or schema.page_size % block:
        raise ValueError(f"page_size {schema.page_size} is no multiple of a block of {block} tokens")
    if not schema.axes:
        raise ValueError(f"the pages can't be cut into blocks of {block} tokens: their axes are not described")
    for i, (name, shape) in enumerate(schema.parts):
        group = _group(schema, i)
        if block % group:
            raise ValueError(
                f"the part {name!r} interleaves {group} tokens (shape {shape}), so blocks of {block} are not apart"
            )
    return [Cut(_outer(schema, i), schema.page_size // block) for i in range(len(schema.parts))]


def difference(here: KVSchema, there: KVSchema) -> str | None:
    """Why pages of one engine mean nothing in the other, as a sentence; None if they do. Pool sizes may differ."""
    fields = ["weights", "layers", "dtype", "axes"]
    if here.page_size == there.page_size or not _same_blocks(here, there):
        fields += ["page_size", "parts"]
    differing = [
        f"{name} is {getattr(there, name)!r} there and {getattr(here, name)!r} here"
        for name in fields
        if getattr(there, name) != getattr(here, name)
    ]
    if not differing:
        return None
    return (
        f"the producer's KV can't be used here: {'; '.join(differing)}; "
        "serve the same weights with the same attention backend and dtype on both sides"
    )


def _same_blocks(here: KVSchema, there: KVSchema) -> bool:
    """Whether blocks of the common size have the same shape on both sides."""
    block = common_block(here, there)
    if not here.axes or not there.axes:
        return False
    try:
        cuts(here, block), cuts(there, block)
        return _block_shapes(here, block) == _block_shapes(there, block)
    except ValueError:
        return False


def _block_shapes(schema: KVSchema, block: int) -> list[tuple[str, tuple[int, ...]]]:
    shapes = []
    for i, (name, shape) in enumerate(schema.parts):
        at = schema.axes[i].index(TOKENS)
        shapes.append((name, (*shape[:at], block // _group(schema, i), *shape[at + 1 :])))
    return shapes


def _outer(schema: KVSchema, part: int) -> int:
    return math.prod(schema.parts[part][1][: _token_axis(schema, part)])


def _group(schema: KVSchema, part: int) -> int:
    """Tokens that share one index of the token axis."""
    length = schema.parts[part][1][_token_axis(schema, part)]
    if length <= 0 or schema.page_size % length:
        raise ValueError(f"page_size is {schema.page_size}, but a page of {schema.parts[part][0]!r} counts {length}")
    return schema.page_size // length


def _token_axis(schema: KVSchema, part: int) -> int:
    name, shape = schema.parts[part]
    if len(schema.axes) != len(schema.parts) or len(schema.axes[part]) != len(shape) or TOKENS not in schema.axes[part]:
        raise ValueError(f"axes {schema.axes!r} don't describe the shape {shape} of the part {name!r}")
    return schema.axes[part].index(TOKENS)


__all__ = ["Cut", "Handle", "common_block", "cuts", "difference"]
