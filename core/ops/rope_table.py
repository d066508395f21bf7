"""Tables of cosines and sines for rotary embeddings, made once when a model is built.

The order of operations is that of the Hugging Face implementations in float32, so that the tables agree to the last
bit and greedy text does not drift at long distances.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from engine.rope import RopeSettings


def rope_table(rope: RopeSettings, max_positions: int) -> Tensor:
    """float32 [max_positions, dim]: cosines, then sines, times the attention factor; see `Ops.rope`."""
    frequencies, scale = inverse_frequencies(rope, max_positions)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos() * scale, angles.sin() * scale), dim=-1)


def inverse_frequencies(rope: RopeSettings, max_positions: int) -> tuple[Tensor, float]:
    """float32 [dim / 2] radians per position, and the factor on cosines and sines."""
    powers = rope.theta ** (torch.arange(0, rope.dim, 2, dtype=torch.float32) / rope.dim)
    match rope.kind:
        case "linear":
            return (1.0 / powers) / rope.factor, 1.0
        case "yarn":
            return _yarn(rope, powers), _yarn_scale(rope)
        case "llama3":
            return _llama3(rope, 1.0 / powers), 1.0
        case "longrope":
            factors = rope.long_factor if max_positions > rope.trained_context else rope.short_factor
            return 1.0 / (torch.tensor(factors, dtype=torch.float32) * powers), _longrope_scale(rope)
        case _:  # "default", and "dynamic" within its trained context
            return 1.0 / powers, 1.0


def _llama3(rope: RopeSettings, frequencies: Tensor) -> Tensor:
    """Llama 3.1: long waves are stretched by the factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / frequencies
    longest = rope.trained_context / rope.low_freq_factor
    shortest = rope.trained_context / rope.high_freq_factor
    stretched = torch.where(wavelengths > longest, frequencies / rope.factor, frequencies)
    smooth = (rope.trained_context / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * stretched / rope.factor + smooth * stretched
    return torch.where((wavelengths >= shortest) & (wavelengths <= longest), between, stretched)


def _yarn(rope: RopeSettings, powers: Tensor) -> Tensor:
    """YaRN (arXiv:2309.00071, section 3.2): a ramp over the dimensions from kept to stretched frequencies."""

    def dimension(rotations: float) -> float:
        return rope.dim * math.log(rope.trained_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (rope.factor * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_scale(rope: RopeSettings) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)


def _longrope_scale(rope: RopeSettings) -> float:
    """LongRoPE (arXiv:2402.13753), as Phi-3 applies it."""
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 1.0 if rope.factor <= 1 else math.sqrt(1 + math.log(rope.factor) / math.log(rope.trained_context))


__all__ = ["inverse_frequencies", "rope_table"]
