"""Attention over `torch.nn.attention.flex_attention`: what it can do, and how to build it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, KVKind, Layout, Mask, Offer, Options

if TYPE_CHECKING:
    from engine.specs.attention import AttentionBackend, AttentionShape


def build(
    options: Options, *, shape: AttentionShape, page_size: int, device: DeviceProfile, **context: object
) -> AttentionBackend:
    """Make the backend; raises ValueError when the heads can't be grouped."""
    from engine_flex_attention.backend import FlexAttention

    return FlexAttention(shape, page_size)


@hookimpl
def attention_backends() -> list[Offer[AttentionBackend]]:
    """One backend; ranked below the built-in kernels, so that only who names it gets it."""
    return [
        Offer(
            name="flex",
            summary="one flex_attention call a layer, with the whole step as one packed sequence",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cpu"}),
                dtypes=frozenset({"float32", "bfloat16", "float16"}),
                kv_kinds=frozenset(KVKind),
                layouts=frozenset({Layout.SPLIT, Layout.LATENT}),
                masks=frozenset({Mask.CAUSAL, Mask.SLIDING_WINDOW, Mask.TREE}),
                flags=frozenset({Flag.SOFTCAP}),
            ),
            rank=-200,
        )
    ]
