"""Random numbers that depend on nothing but the request: one number per (seed, position, stream).

A counter-based generator makes a request's text independent of what else is in the batch, of preemption and of the
steps in which its tokens were computed. The mixing function is SplitMix64 (Steele, Lea and Flood, 2014).
"""

from __future__ import annotations

from enum import IntEnum

_MASK = (1 << 64) - 1


class Stream(IntEnum):
    """Independent sequences of one request."""

    SAMPLE = 0
    ACCEPT = 1  # whether a sampled draft token is kept


def _mix(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def uniform(seed: int, position: int, stream: Stream = Stream.SAMPLE, nth: int = 0) -> float:
    """A number in [0, 1) with 53 random bits; `nth` tells apart several of one stream at one position."""
    return (_mix(_mix(_mix(seed & _MASK) ^ position) ^ int(stream) ^ nth << 8) >> 11) * 2.0**-53


__all__ = ["Stream", "uniform"]
