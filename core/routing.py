"""How tokens choose among experts, as data: read by models from a `config.json`, applied by `engine.ops.experts`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """One router's rule (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437)."""

    scoring: Literal["softmax", "sigmoid"]
    experts: int
    chosen: int  # experts per token
    groups: int = 1  # experts lie in this many equal groups
    chosen_groups: int = 1  # and a token's experts come from this many of them
    normalize: bool = False  # weights of the chosen ones sum to one before they are scaled
    scale: float = 1.0
    corrected: bool = False  # a learnt bias takes part in the choice, not in the weights
    always: int = 0  # further experts, numbered after the others, that every token takes with weight one

    @property
    def taken(self) -> int:
        """Experts that one token runs through."""
        return self.chosen + self.always


__all__ = ["Routing"]
