"""Blocks taken apart hold the weights that decoding gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.plugins.quantization.blocks.rounding import dense
from engine.plugins.weight_loaders.gguf.blocks import DECODERS
from engine.plugins.weight_loaders.gguf.format import BLOCK_FORMATS
from engine.plugins.weight_loaders.gguf.stored import SPLITTERS

SCALES = {"Q4_0": 1, "Q4_1": 2, "Q5_0": 1, "Q5_1": 2, "Q8_0": 1, "Q4_K": 2, "Q5_K": 2}
"""float16 numbers that begin a block."""


def raw(name: str, rows: int, blocks: int) -> Tensor:
    """Random blocks with finite scales."""
    size = next(form.size for form in BLOCK_FORMATS.values() if form.name == name)
    random = np.random.default_rng(5)
    found = random.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in range(SCALES[name]):
        halves = random.standard_normal((rows, blocks, 1)).astype(np.float16)
        found[..., 2 * at : 2 * at + 2] = halves.view(np.uint8)
    return torch.from_numpy(found)


@pytest.mark.parametrize("name", SPLITTERS)
def test_parts_make_up_the_decoded_weights(name: str) -> None:
    stored = raw(name, 6, 3)
    want = DECODERS[name](stored.flatten(0, 1)).view(6, -1)
    blocks = SPLITTERS[name](stored)
    assert blocks.codes.shape == (6, want.shape[1] // 32, 16 if blocks.bits == 4 else 32)
    assert blocks.codes.dtype is (torch.uint8 if blocks.bits == 4 else torch.int8)
    assert blocks.scale.dtype is torch.float16
    assert blocks.scale.shape == blocks.codes.shape[:2]
    found = dense(blocks)
    if name.endswith("_K"):  # scales are products, rounded to float16
        torch.testing.assert_close(found, want, rtol=0, atol=2**-10 * want.abs().max().item())
    else:
        torch.testing.assert_close(found, want, rtol=1e-6, atol=1e-5)


def test_formats_with_a_scale_for_32_weights_are_all_there() -> None:
    assert set(DECODERS) - set(SPLITTERS) == {"F32", "F16", "BF16", "Q6_K"}


def test_quantization_knows_what_the_loader_gives() -> None:
    from engine.plugins.quantization import blocks

    for offer in blocks.quantizations():
        assert set(offer.formats) <= set(SPLITTERS)
        for name, size in offer.formats.items():
            given = SPLITTERS[name](raw(name, 1, 1))
            kept = given.codes.nbytes + given.scale.nbytes * (1 if given.bits == 8 and given.offset is None else 2)
            assert size == kept / given.scale.numel() / 32, name


def test_a_file_tells_its_formats_and_gives_its_blocks(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from engine.plugins.weight_loaders.gguf.loader import GGUFLoader

    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (("block_count", 1), ("context_length", 64), ("embedding_length", 64)):
        writer.add_uint32(f"llama.{key}", value)
    for key, value in (("feed_forward_length", 64), ("attention.head_count", 2), ("attention.head_count_kv", 1)):
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    random = np.random.default_rng(0)
    kinds = gguf.GGMLQuantizationType
    for name, rows, kind in (
        ("token_embd", 96, kinds.Q8_0),
        ("blk.0.attn_q", 64, kinds.Q4_1),
        ("output", 96, kinds.F16),
    ):
        values = random.standard_normal((rows, 64)).astype(np.float32)
        writer.add_tensor(f"{name}.weight", gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("output_norm.weight", np.ones(64, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    loader = GGUFLoader()
    assert loader.formats(path) == {"Q8_0": 96 * 64, "Q4_1": 64 * 64, "F16": 96 * 64}
    source = loader.open(path, loader.config(path))
    for name, bits in (("model.embed_tokens.weight", 8), ("model.layers.0.self_attn.q_proj.weight", 4)):
        blocks = source.blocks(name)
        assert blocks is not None
        assert blocks.bits == bits
        torch.testing.assert_close(dense(blocks), source.get(name, torch.float32), rtol=1e-6, atol=1e-6)
    assert source.blocks("lm_head.weight") is None
    assert source.blocks("model.norm.weight") is None
    with pytest.raises(KeyError, match=r"lacks tensor absent"):
        source.blocks("absent")
