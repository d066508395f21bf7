"""Weights of 8 or 4 bits in blocks of 32 with a scale each, multiplied without decoding them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from engine.hooks import hookimpl
from engine.ops.kernels import QUANT_FEATURES, missing
from engine.plugin import Capabilities, DeviceProfile, Flag, Needs, Options
from engine.specs.quantization import Quantization, QuantizationOffer

if TYPE_CHECKING:
    import torch

FOUR: Final = 20 / 32  # bytes a weight: code, scale and offset
EIGHT: Final = 34 / 32  # code and scale
EIGHT_OFFSET: Final = 36 / 32

AS_STORED: Final[Mapping[str, float]] = {
    "Q4_0": FOUR,
    "Q4_1": FOUR,
    "Q4_K": FOUR,
    "Q5_0": EIGHT,
    "Q5_1": EIGHT_OFFSET,
    "Q5_K": EIGHT_OFFSET,
    "Q8_0": EIGHT,
}
AS_FOUR: Final = {name: FOUR for name in AS_STORED if name.startswith("Q4")}


def _build(device: DeviceProfile, bits: int) -> Quantization:
    from engine.plugins.quantization.blocks.quantization import BlockQuantization

    return BlockQuantization(bits, kernels=missing(device, QUANT_FEATURES) is None)


def build_stored(options: Options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization:
    """The file's own blocks; what it keeps otherwise is rounded to 8 bits."""
    return _build(device, 8)


def build_int4(options: Options, *, device: DeviceProfile, dtype: torch.dtype) -> Quantization:
    """The file's own blocks of 4 bits; what it keeps otherwise is rounded to them."""
    return _build(device, 4)


def missing_kernels(device: DeviceProfile) -> str | None:
    """None when the integer kernels run on this device, else what they lack."""
    return missing(device, QUANT_FEATURES)


@hookimpl
def quantizations() -> list[QuantizationOffer]:
    """`blocks` for files that have some, `int8` and `int4` for any."""
    linears = {"models": Needs(flags=frozenset({Flag.LINEARS}))}
    anywhere = Capabilities(devices=frozenset({"cpu"}), dtypes=frozenset({"float32", "bfloat16"}))
    return [
        QuantizationOffer(
            name="blocks",
            summary="the blocks of 4 or 8 bits of a GGUF file, multiplied as they are with inputs of 8 bits",
            build=build_stored,
            capabilities=Capabilities(
                devices=frozenset({"cpu"}), dtypes=frozenset({"bfloat16"}), flags=frozenset({Flag.FAITHFUL})
            ),
            available=missing_kernels,
            requires=linears,
            rank=40,
            bytes_per_weight=EIGHT,
            formats=AS_STORED,
            copies_tied_head=True,
        ),
        QuantizationOffer(
            name="int8",
            summary="weights of 8 bits in blocks of 32, for any checkpoint",
            build=build_stored,
            capabilities=anywhere,
            requires=linears,
            bytes_per_weight=EIGHT,
            formats=AS_STORED,
            copies_tied_head=True,
        ),
        QuantizationOffer(
            name="int4",
            summary="weights of 4 bits in blocks of 32, for any checkpoint",
            build=build_int4,
            capabilities=anywhere,
            requires=linears,
            bytes_per_weight=FOUR,
            formats=AS_FOUR,
            copies_tied_head=True,
        ),
    ]
