"""The reference attention backend: paged, pure torch, exact. Every other backend must compute what this one does."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, KVKind, Layout, Mask, Offer, Options

if TYPE_CHECKING:
    from engine.specs.attention import AttentionBackend, AttentionShape


class ReferenceOptions(Options):
    """The reference has nothing to set."""


def build(
    options: ReferenceOptions, *, shape: AttentionShape, page_size: int, device: DeviceProfile
) -> AttentionBackend:
    """Make the backend; raises ValueError when the heads can't be grouped."""
    from engine.plugins.attention.reference.backend import ReferenceAttention
    from engine.plugins.attention.reference.latent import ReferenceLatent

    return ReferenceLatent(shape, page_size) if shape.kind is KVKind.MLA else ReferenceAttention(shape, page_size)


@hookimpl
def attention_backends() -> list[Offer[AttentionBackend]]:
    """The reference, ranked below every faster backend."""
    return [
        Offer(
            name="reference",
            summary="Exact paged attention in pure torch, for any device; slow.",
            build=build,
            options=ReferenceOptions,
            capabilities=Capabilities(
                dtypes=frozenset({"float32", "bfloat16", "float16"}),
                kv_kinds=frozenset(KVKind),
                layouts=frozenset(Layout),
                masks=frozenset({Mask.CAUSAL, Mask.SLIDING_WINDOW, Mask.TREE, Mask.TREE_LEVELS}),
                flags=frozenset({Flag.SOFTCAP, Flag.PACKED_ROWS}),
            ),
            rank=-100,
            efficiency={"cpu": 0.05},
        )
    ]
