"""A backend that does what another does, but for the faults of its script."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from engine.faults import Trigger, kill
from engine.latent.up import LatentUp
from engine.plugins.attention.faulty import AttentionFault
from engine.specs.attention import AttentionBackend, AttentionBatch, KVLayout


@dataclass(frozen=True, slots=True)
class Plan:
    """The inner plan, and what goes wrong in this step."""

    inner: Any
    faults: tuple[AttentionFault, ...]
    first: int  # rows of the first request


class FaultyAttention(AttentionBackend):
    """Raises ValueError when a fault names a layer that does not exist."""

    def __init__(self, inner: AttentionBackend, faults: Sequence[AttentionFault], *, layers: int) -> None:
        for fault in faults:
            if fault.layer >= layers:
                raise ValueError(f"a fault names layer {fault.layer}, but the model has {layers}: 0 to {layers - 1}")
        self._inner = inner
        self._script = [(fault, Trigger(fault)) for fault in faults]

    def kv_layout(self) -> KVLayout:
        return self._inner.kv_layout()

    def plan(self, batch: AttentionBatch) -> Plan:
        striking = tuple(fault for fault, trigger in self._script if trigger.fires())
        return Plan(self._inner.plan(batch), striking, int(batch.query_lens_host[:1].sum()))

    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Plan) -> Tensor:
        return self._struck(layer, self._inner.forward(layer, q, k, v, kv, plan.inner), plan)

    def forward_latent(
        self, layer: int, q: Tensor, rows: Tensor, up: LatentUp, kv: tuple[Tensor, ...], plan: Plan
    ) -> Tensor:
        return self._struck(layer, self._inner.forward_latent(layer, q, rows, up, kv, plan.inner), plan)

    def _struck(self, layer: int, out: Tensor, plan: Plan) -> Tensor:
        for fault in plan.faults:
            if fault.layer == layer:
                _strike(fault, out[: plan.first] if fault.requests == "first" else out)
        return out


def _strike(fault: AttentionFault, rows: Tensor) -> None:
    match fault.kind:
        case "nan":
            rows.fill_(float("nan"))
        case "corrupt":
            rows.neg_().add_(1.0)
        case "delay":
            time.sleep(fault.seconds)
        case "raise":
            raise RuntimeError(f"injected fault: attention failed in layer {fault.layer}")
        case "kill":
            kill()


__all__ = ["FaultyAttention"]
