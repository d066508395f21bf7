"""bfloat16 weights repacked, without loss, for the compiled CPU kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.hooks import hookimpl
from engine.ops.kernels import missing
from engine.plugin import Capabilities, DeviceProfile, Flag, Needs, Options
from engine.specs.quantization import Quantization, QuantizationOffer

if TYPE_CHECKING:
    import torch


def build(options: Options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization:
    """Packed linear layers, on as many threads as torch uses."""
    from engine.plugins.quantization.packed.linear import PackedQuantization

    return PackedQuantization()


@hookimpl
def quantizations() -> list[QuantizationOffer]:
    """The packed layers."""
    return [
        QuantizationOffer(
            name="packed",
            summary="bfloat16 weights in the order that the CPU kernels stream them; no loss",
            build=build,
            capabilities=Capabilities(
                devices=frozenset({"cpu"}), dtypes=frozenset({"bfloat16"}), flags=frozenset({Flag.LOSSLESS})
            ),
            available=missing,
            requires={"models": Needs(flags=frozenset({Flag.LINEARS}))},
            rank=50,
            copies_tied_head=True,
        )
    ]
