"""What a runner needs to make a loaded resident its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from engine.resident.driver import Resident
from engine.resident.pages import DraftPages
from engine.specs.attention import AttentionBackend
from engine.specs.speculator import ResidentPlan, ResidentSpeculator

if TYPE_CHECKING:
    from engine.runner import StepForward


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftKV:
    """Memory and attention of a resident's own layers."""

    forward: StepForward  # over a pool of `pages` + (`slots` + 1) x `scratch` pages
    backend: AttentionBackend
    scratch: int  # pages per slot behind those of the target


@dataclass(frozen=True, slots=True, kw_only=True)
class ResidentParts:
    """A loaded resident."""

    speculator: ResidentSpeculator
    plan: ResidentPlan
    kv: DraftKV | None
    pages: int  # of the target's pool
    page_size: int
    vocab_size: int
    chain: int = 0  # tokens of the chains that it drafts without the host, in graphs; 0 if it can't

    def join(self, tokens: np.ndarray, tables: np.ndarray, *, trees: bool, device: torch.device) -> Resident:
        """The resident of the runner that keeps these tokens and block tables."""
        drafts = None
        if self.kv:
            drafts = DraftPages(
                self.kv.forward,
                self.kv.backend,
                tables,
                page_size=self.page_size,
                pages=self.pages,
                scratch=self.kv.scratch,
                device=device,
            )
        return Resident(
            self.speculator,
            self.plan,
            drafts,
            tokens,
            tables,
            target_pages=self.pages,
            page_size=self.page_size,
            vocab_size=self.vocab_size,
            chain=self.chain,
            trees=trees,
            device=device,
        )


def scratch_pages(plan: ResidentPlan, page_size: int) -> int:
    """Pages for the places of a draft that lie behind the page of the newest token."""
    return -(-plan.places // page_size)


__all__ = ["DraftKV", "ResidentParts", "scratch_pages"]
