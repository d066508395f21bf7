"""Dense weights on CUDA, with kernels of their own for few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.ops.kernels import missing_triton
from engine.plugin import Capabilities, DeviceProfile, Flag, Needs, Options
from engine.specs.quantization import Quantization, QuantizationOffer

FP8 = (8, 9)
"""Compute capability from which Triton converts e4m3."""

if TYPE_CHECKING:
    import torch


def build(options: Options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization:
    """Linear layers in `dtype`."""
    from engine.plugins.quantization.narrow.linear import NarrowQuantization

    return NarrowQuantization(dtype, scaled=(device.compute_capability or (0, 0)) >= FP8)


@hookimpl
def quantizations() -> list[QuantizationOffer]:
    """The dense layers."""
    return [
        QuantizationOffer(
            name="narrow",
            summary="dense weights on CUDA; decodes multiply by kernels that read the weight at the speed of memory",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cuda"}),
                min_compute_capability=(8, 0),
                dtypes=frozenset({"bfloat16", "float16"}),
                flags=frozenset({Flag.LOSSLESS, Flag.GRAPH_SAFE}),
            ),
            available=missing_triton,
            requires={"models": Needs(flags=frozenset({Flag.LINEARS}))},
            rank=50,
        )
    ]
