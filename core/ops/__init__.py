"""The small operations around the matrix products: norms, rotary embedding, gated activation.

`select` picks one implementation for a device while the engine is composed; models call its methods directly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from engine.device import DeviceProfile
    from engine.ops.experts import Stack
    from engine.routing import Routing


class Ops(ABC):
    """One implementation. Inputs are [T, …] with a dense last axis; results are fresh unless said otherwise."""

    @abstractmethod
    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / rms(x) * weight over the last axis. Statistics in float32; rounded to x's dtype, then multiplied."""

    @abstractmethod
    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """residual += x in place; returns rms_norm(residual, weight, eps).

        x is [T, width], or [T, parts, width] whose parts are summed first, in float32 and in order.
        """

    @abstractmethod
    def rope(self, q: Tensor, k: Tensor, positions: Tensor, cos_sin: Tensor) -> None:
        """Rotate q [T, H, D] and k [T, KVH, D] in place (views into a merged projection are fine).

        cos_sin: float32 [max positions, R], cosines in the first R/2 columns and sines in the rest, multiplied by any
        attention factor. The first R of the D elements rotate, element i with element i + R/2.
        """

    @abstractmethod
    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[T, 2 I] -> [T, I]: silu of the first half times the second."""

    @abstractmethod
    def route(self, x: Tensor, router: Tensor, correction: Tensor | None, rule: Routing) -> tuple[Tensor, Tensor]:
        """Choose each token's experts: integers [T, rule.taken] and their weights float32 [T, rule.taken].

        x [T, hidden], router [experts, hidden] in the same dtype, correction float32 [experts].
        """

    @abstractmethod
    def mix(self, x: Tensor, ids: Tensor, weights: Tensor, gate_up: Stack, down: Stack, always: int = 0) -> Tensor:
        """The weighted sum of the outputs of each token's experts, down(silu(gate x) * up x).

        [T, hidden], or [T, parts, hidden] whose parts are still to be summed, as `add_rms_norm` does. ids and weights
        are as `route` gives them, for a rule with so many experts that are taken `always`; `gate_up` holds the rows of
        gate, then those of up.
        """

    @abstractmethod
    def latent_rows(
        self, queries: Tensor, made: Tensor, norm: Tensor, eps: float, positions: Tensor, cos_sin: Tensor
    ) -> Tensor:
        """The rows that latent attention stores, [T, latent + R]: the latent normed, the key behind it rotated.

        made [T, latent + R] is what was projected, norm [latent]. The last R elements of each head of queries
        [T, H, D] rotate in place. `cos_sin` as for `rope`.
        """

    @abstractmethod
    def absorb(self, queries: Tensor, key: Tensor) -> Tensor:
        """queries [T, H, nope + R] and key [H, nope, latent] -> [T, H, latent + R], which meet rows as stored."""

    @abstractmethod
    def lift(self, latents: Tensor, value: Tensor) -> Tensor:
        """Weighted sums of latents [T, H, latent] and value [H, V, latent] -> those of values, [T, H, V]."""


def select(device: DeviceProfile, dtype: torch.dtype) -> Ops:
    """The fastest implementation that runs on the device with this dtype."""
    import torch

    from engine.ops.kernels import missing

    if dtype in (torch.bfloat16, torch.float32) and missing(device) is None:
        from engine.ops.native import NativeOps

        return NativeOps()
    if device.kind == "cuda" and find_spec("triton") is not None:
        from engine.ops.triton_ops import TritonOps

        return TritonOps()
    from engine.ops.reference import TorchOps

    return TorchOps()


__all__ = ["Ops", "select"]
