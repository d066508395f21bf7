"""Dense weights, multiplied as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.plugin import Capabilities, DeviceProfile, Flag, Offer, Options
from engine.specs.quantization import Quantization

if TYPE_CHECKING:
    import torch


def build(options: Options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization:
    """Linear layers in `dtype`, on the device that each is asked for."""
    from engine.plugins.quantization.none.linear import DenseQuantization

    return DenseQuantization(dtype)


@hookimpl
def quantizations() -> list[Offer[Quantization]]:
    """The dense layers."""
    return [
        Offer(
            name="none",
            summary="dense weights, multiplied as they are",
            build=build,
            capabilities=Capabilities(flags=frozenset({Flag.LOSSLESS})),
            efficiency={"cpu": 0.2, "cuda": 0.8},  # one row through oneDNN and cuBLAS
        )
    ]
