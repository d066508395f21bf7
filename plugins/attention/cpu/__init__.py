"""Attention by the compiled CPU kernels."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.ops.kernels import missing
from engine.plugin import Capabilities, DeviceProfile, Flag, KVKind, Layout, Mask, Offer, Options
from engine.specs.attention import AttentionBackend, AttentionShape


def build(options: Options, *, shape: AttentionShape, page_size: int, device: DeviceProfile) -> AttentionBackend:
    """The backend for one model, on as many threads as torch uses."""
    from engine.plugins.attention.cpu.backend import CpuAttention

    return CpuAttention(shape, page_size)


@hookimpl
def attention_backends() -> list[Offer[AttentionBackend]]:
    """The one backend."""
    return [
        Offer(
            name="cpu",
            summary="compiled kernels for AVX-512 with BF16: paged flash attention for decodes, prefills and drafts",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cpu"}),
                dtypes=frozenset({"float32", "bfloat16"}),
                kv_kinds=frozenset({KVKind.GQA}),
                layouts=frozenset({Layout.SPLIT}),
                page_sizes=frozenset(range(16, 1025, 16)),
                head_dims=frozenset(range(16, 513, 16)),
                masks=frozenset({Mask.CAUSAL, Mask.SLIDING_WINDOW, Mask.TREE, Mask.TREE_LEVELS}),
                flags=frozenset({Flag.SOFTCAP}),
            ),
            available=missing,
            rank=50,
        )
    ]
