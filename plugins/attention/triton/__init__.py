"""Attention for NVIDIA GPUs, written in Triton."""

from __future__ import annotations

from pydantic import Field

from engine.hooks import hookimpl
from engine.ops.kernels import missing_triton
from engine.plugin import Capabilities, DeviceProfile, Flag, KVKind, Mask, Offer, Options
from engine.specs.attention import AttentionBackend, AttentionShape


class TritonOptions(Options):
    """What is not chosen by the shape."""

    fused_rotation: bool = Field(
        False,
        description="Let decodes rotate queries and new keys as they read them, which saves a launch a layer. Its sums "
        "were compared in Triton's interpreter, not yet on a GPU.",
    )


def build(options: TritonOptions, *, shape: AttentionShape, page_size: int, device: DeviceProfile) -> AttentionBackend:
    """The backend for one model; raises ValueError when the shape is none that its capabilities allow."""
    if shape.kind is KVKind.MLA:
        from engine.plugins.attention.triton.mla import TritonLatent

        return TritonLatent(shape, page_size, device)
    from engine.plugins.attention.triton.backend import TritonAttention

    return TritonAttention(shape, page_size, device, fused_rotation=options.fused_rotation)


@hookimpl
def attention_backends() -> list[Offer[AttentionBackend]]:
    """The one backend."""
    return [
        Offer(
            name="triton",
            summary="paged flash attention in Triton: split keys for decodes, tiles for prefills, chunks and drafts",
            build=build,
            options=TritonOptions,
            capabilities=Capabilities(
                devices=frozenset({"cuda"}),
                min_compute_capability=(8, 0),
                dtypes=frozenset({"float32", "bfloat16", "float16"}),
                kv_kinds=frozenset(KVKind),
                head_dims=frozenset({16, 32, 64, 80, 96, 112, 128, 192, 256, 576}),
                masks=frozenset({Mask.CAUSAL, Mask.SLIDING_WINDOW, Mask.TREE}),
                flags=frozenset({Flag.SOFTCAP, Flag.GRAPH_SAFE, Flag.PACKED_ROWS, Flag.PACKED_HEADS}),
            ),
            available=missing_triton,
            rank=50,
        )
    ]
