"""A resident between composing and loading: what it asks for, and what that takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.errors import CompositionError
from engine.kv_memory import cut_pool, pool_bytes
from engine.resident.parts import DraftKV, ResidentParts, scratch_pages
from engine.specs.attention import AttentionBackend, AttentionShape
from engine.specs.speculator import Checkpoint, ResidentPlan, ResidentSpeculator, TargetTaps

Attention = Callable[[AttentionShape], AttentionBackend]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedResident:
    """A resident that has said what it needs."""

    speculator: ResidentSpeculator
    plan: ResidentPlan
    backend: AttentionBackend | None
    page_size: int
    slots: int

    def bytes(self, pages: int) -> int:
        """Memory of its KV beside so many pages of the target's, scratch included."""
        if self.plan.kv is None or self.backend is None:
            return 0
        return pool_bytes(self.backend.kv_layout(), len(self.plan.kv.windows), pages + self._scratch)

    def page_bytes(self) -> float:
        """What one more page of the target's takes here."""
        return (self.bytes(1024) - self.bytes(0)) / 1024

    def parts(self, pages: int, vocab_size: int, device: torch.device, chain: int) -> ResidentParts:
        """Cut the draft pool beside `pages` pages of the target's. The speculator must be loaded before it drafts.

        `chain` is as in `ResidentParts`.
        """
        from engine.runner import StepForward

        kv = None
        if self.plan.kv is not None and self.backend is not None:
            pool = cut_pool(self.backend.kv_layout(), len(self.plan.kv.windows), pages + self._scratch, device)
            forward = StepForward(self.backend, pool, TargetTaps())
            kv = DraftKV(forward=forward, backend=self.backend, scratch=scratch_pages(self.plan, self.page_size))
        return ResidentParts(
            speculator=self.speculator,
            plan=self.plan,
            kv=kv,
            pages=pages,
            page_size=self.page_size,
            vocab_size=vocab_size,
            chain=chain,
        )

    @property
    def _scratch(self) -> int:
        return (self.slots + 1) * scratch_pages(self.plan, self.page_size)  # one for padding


def plan_resident(
    name: str, speculator: ResidentSpeculator, checkpoint: Checkpoint, attention: Attention, slots: int
) -> PlannedResident:
    """Ask a resident what it needs.

    Args:
        name: what the configuration calls it.
        attention: makes the backend of a shape.

    Raises:
        CompositionError: it can't draft for this target, or its attention can't be had here.
    """
    try:
        plan = speculator.plan(checkpoint)
        backend = attention(plan.kv) if plan.kv is not None else None
    except ValueError as error:
        raise CompositionError(f"speculator: {name!r} can't draft for this model: {error}") from error
    return PlannedResident(
        speculator=speculator, plan=plan, backend=backend, page_size=checkpoint.page_size, slots=slots
    )


__all__ = ["Attention", "PlannedResident", "plan_resident"]
