"""Multi-head latent attention for NVIDIA Hopper, written in Gluon and in CUDA C++ that is compiled when needed."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.ops.kernels import missing_triton
from engine.plugin import Capabilities, DeviceProfile, Flag, KVKind, Layout, Mask, Offer, Options
from engine.specs.attention import AttentionBackend, AttentionShape


def build(options: Options, *, shape: AttentionShape, page_size: int, device: DeviceProfile) -> AttentionBackend:
    """The backend for one model; raises ValueError when the shape is none that its capabilities allow."""
    from engine.plugins.attention.flashmla.backend import FlashMLA

    return FlashMLA(shape, page_size, device)


def missing(device: DeviceProfile) -> str | None:
    """None on Hopper with Triton installed, else what is wrong."""
    if device.kind == "cuda" and device.compute_capability and device.compute_capability >= (10, 0):
        return "its kernels use instructions that only compute capability 9.0 (Hopper) has"
    return missing_triton(device)


@hookimpl
def attention_backends() -> list[Offer[AttentionBackend]]:
    """The one backend."""
    return [
        Offer(
            name="flashmla",
            summary="latent attention (MLA) for Hopper: tensor cores, TMA, warps with roles; bfloat16 and 8-bit rows",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cuda"}),
                min_compute_capability=(9, 0),
                dtypes=frozenset({"bfloat16"}),
                kv_kinds=frozenset({KVKind.MLA}),
                layouts=frozenset({Layout.LATENT, Layout.PACKED}),
                page_sizes=frozenset({64}),
                head_dims=frozenset({576}),
                masks=frozenset({Mask.CAUSAL}),
                flags=frozenset({Flag.GRAPH_SAFE, Flag.PACKED_ROWS}),
            ),
            available=missing,
            rank=60,  # above `triton`: faster in every case that was timed but 8-bit rows of many heads
        )
    ]
