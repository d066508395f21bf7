"""The operations in plain torch, against what the Hugging Face Llama does, and rotary tables against its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.ops.reference import TorchOps
from engine.ops.rope_table import rope_table
from engine.rope import read_rope

OPS = TorchOps()
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
ROTATIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 1024},
    "yarn, untruncated": {"rope_type": "yarn", "factor": 4.0, "truncate": False, "beta_slow": 2.0},
    "yarn, attention factor": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.25},
    "yarn, no stretch": {"rope_type": "yarn", "factor": 1.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256},
}


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(dtype)


@DTYPES
def test_rms_norm_is_bit_exact(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(64, eps=1e-5).to(dtype)
    theirs.weight.data = normal(64, dtype=dtype)
    x = normal(7, 3, 64, dtype=dtype)[:, 1]  # rows with gaps between them
    assert torch.equal(OPS.rms_norm(x, theirs.weight, 1e-5), theirs(x))


@DTYPES
def test_add_rms_norm_adds_in_place(dtype: torch.dtype) -> None:
    x, residual, weight = normal(5, 64, dtype=dtype), normal(5, 2, 64, dtype=dtype)[:, 0], normal(64, dtype=dtype)
    total = residual + x
    found = OPS.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(found, OPS.rms_norm(total, weight, 1e-6))


@DTYPES
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = normal(5, 64, dtype=dtype)
    expected = torch.nn.functional.silu(gate_up[:, :32]) * gate_up[:, 32:]
    assert torch.equal(OPS.silu_mul(gate_up), expected)


def test_rope_rotates_views_as_transformers_does() -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=512)
    merged = normal(9, 8, 16, dtype=torch.float32)
    q, k = merged[:, :4], merged[:, 4:6]
    positions = torch.tensor([0, 1, 2, 500, 3, 77, 78, 0, 511])
    cos, sin = LlamaRotaryEmbedding(config)(q, positions[None])
    expected = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    untouched = merged[:, 6:].clone()
    OPS.rope(q, k, positions, rope_table(read_rope(config.to_dict(), 16), 512))
    for found, theirs in zip((q, k), expected, strict=True):
        assert torch.equal(found, theirs[0].transpose(0, 1))
    assert torch.equal(merged[:, 6:], untouched)


def test_rope_of_a_part_leaves_the_rest() -> None:
    table = rope_table(read_rope({"partial_rotary_factor": 0.5}, 16), 32)
    assert table.shape == (32, 8)
    q, k = normal(5, 2, 16, dtype=torch.float32), normal(5, 1, 16, dtype=torch.float32)
    before, positions = q.clone(), torch.arange(5) + 3
    OPS.rope(q, k, positions, table)
    assert torch.equal(q[..., 8:], before[..., 8:])
    whole_q, whole_k = before[..., :8].clone(), normal(5, 1, 16, dtype=torch.float32)[..., :8].clone()
    OPS.rope(whole_q, whole_k, positions, table)
    assert torch.equal(q[..., :8], whole_q)


@pytest.mark.parametrize("name", ROTATIONS)
def test_tables_are_bit_exact(name: str) -> None:
    given = {"rope_type": name.split(",")[0], "rope_theta": 5000.0} | ROTATIONS[name]
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=4, max_position_embeddings=4096, rope_parameters=dict(given)
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(4096)[None])
    expected = torch.cat((cos[0, :, :32], sin[0, :, :32]), dim=1)
    assert torch.equal(rope_table(read_rope(config.to_dict(), 64), 4096), expected)


@pytest.mark.parametrize(("positions", "factors"), [(1024, "short_factor"), (4096, "long_factor")])
def test_longrope_takes_the_factors_of_the_context(positions: int, factors: str) -> None:
    given = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.05 * i for i in range(32)],
        "long_factor": [1.0 + i for i in range(32)],
        "original_max_position_embeddings": 1024,
    }
    config = {"max_position_embeddings": 4096, "rope_parameters": given}
    table = rope_table(read_rope(config, 64), positions)
    powers = 10000.0 ** (torch.arange(0, 64, 2, dtype=torch.float64) / 64)
    angles = 100.0 / (torch.tensor(given[factors], dtype=torch.float64) * powers)
    scale = (1 + torch.log(torch.tensor(4.0)) / torch.log(torch.tensor(1024.0))).sqrt()
    torch.testing.assert_close(table[100, :32], (angles.cos() * scale).float(), rtol=1e-4, atol=1e-4)
