"""Block formats, bit for bit against the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from engine.plugins.weight_loaders.gguf.blocks import DECODERS
from engine.plugins.weight_loaders.gguf.format import BLOCK_FORMATS

HALVES = {
    "F16": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where each format keeps float16 numbers, which random bytes would make infinite."""


def random_blocks(name: str, count: int) -> np.ndarray:
    size = next(form.size for form in BLOCK_FORMATS.values() if form.name == name)
    random = np.random.default_rng(11)
    if name in ("F32", "BF16"):
        values = torch.from_numpy(random.standard_normal((count, 1), dtype=np.float32))
        kept = values if name == "F32" else values.bfloat16()
        return kept.view(torch.uint8).numpy()
    blocks = random.integers(0, 256, (count, size), dtype=np.uint8)
    for at in HALVES[name]:
        blocks[:, at : at + 2] = random.standard_normal((count, 1)).astype(np.float16).view(np.uint8)
    return blocks


@pytest.mark.parametrize("name", [form.name for form in BLOCK_FORMATS.values()])
def test_decoding_is_exact(name: str) -> None:
    blocks = random_blocks(name, 200)
    expected = gguf.quants.dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType[name])
    found = DECODERS[name](torch.from_numpy(blocks))
    assert found.dtype is torch.float32
    assert np.array_equal(found.numpy().reshape(-1).view(np.uint32), expected.reshape(-1).view(np.uint32))
    assert len(np.unique(found)) > 100, "a constant would agree by chance"


@pytest.mark.parametrize(("number", "form"), BLOCK_FORMATS.items())
def test_sizes_are_those_of_the_format(number: int, form: tuple[str, int, int]) -> None:
    kind = gguf.GGMLQuantizationType(number)
    assert (kind.name, *gguf.GGML_QUANT_SIZES[kind]) == tuple(form)


def test_every_readable_type_has_a_decoder() -> None:
    assert {form.name for form in BLOCK_FORMATS.values()} == set(DECODERS)
