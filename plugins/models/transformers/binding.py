"""Leads the attention of a transformers model to the engine's backend and paged KV.

transformers looks an attention function up by name; ours is registered under one name for all models and finds its way
by the binding that each module of a bound model carries. Masks are not made for a name without a mask function, so
ragged batches travel as one sequence and the backend alone says who sees what.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.specs.model import Forward, ModelProfile

NAME: Final = "engine"


class Binding:
    """One model's way to the engine. `step` is set before each forward pass."""

    def __init__(self, model: PreTrainedModel, profile: ModelProfile) -> None:
        self.step: Forward | None = None
        self._profile = profile
        self._layers: dict[nn.Module, int] = {}
        self._checking = False
        for module in model.modules():
            module.engine_binding = self  # type: ignore[assignment]

    def check(self, base: nn.Module, device: torch.device) -> None:
        """Run one token to learn which module is which layer, and whether all of them do what the profile says.

        Raises:
            ValueError: a layer attends in a way that the engine can't honour, or not at all.
        """
        self._layers, self._checking = {}, True
        token = torch.zeros((1, 1), dtype=torch.int64, device=device)
        base(input_ids=token, position_ids=token, use_cache=False)
        self._checking = False
        if len(self._layers) != self._profile.layers:
            raise ValueError(
                f"{self._profile.architecture}: {len(self._layers)} of {self._profile.layers} layers attend in the "
                "standard way; the others keep a state that the engine can't page"
            )

    def attend(self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **given: Any) -> Tensor:
        """q [1, heads, T, head_dim], k and v likewise -> [1, T, heads, v_head_dim]."""
        if self._checking:
            self._compare(q, k, v, mask, getattr(module, "is_causal", True), given)
            self._layers[module] = len(self._layers)
            return v.new_zeros(q.shape[0], q.shape[2], q.shape[1], v.shape[3])
        assert self.step is not None, "set before the forward pass"
        rows = (x[0].transpose(0, 1).to(v.dtype) for x in (q, k, v))
        return self.step.attend(self._layers[module], *rows).unsqueeze(0)

    def _compare(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, given: dict[str, Any]
    ) -> None:
        layer, profile = len(self._layers), self._profile
        scale = given.get("scaling")
        pairs = {
            "layers": (profile.layers, max(layer + 1, profile.layers)),
            "heads": (profile.heads, q.shape[1]),
            "key heads": (profile.kv_heads, k.shape[1]),
            "head size": (profile.head_dim, q.shape[3]),
            "value head size": (profile.v_head_dim, v.shape[3]),
            "scale": (round(profile.scale, 6), round(scale if scale is not None else q.shape[3] ** -0.5, 6)),
            "window": (profile.windows[min(layer, profile.layers - 1)], given.get("sliding_window")),
            "softcap": (profile.softcap, given.get("softcap")),
            "causal mask": (True, causal and given.get("is_causal") is not False),
            "mask of its own": (None, None if mask is None else tuple(mask.shape)),
            "attention sinks": (None, None if given.get("s_aux") is None else "given"),
            "position bias": (None, None if given.get("position_bias") is None else "given"),
        }
        for what, (expected, found) in pairs.items():
            if expected != found:
                raise ValueError(
                    f"{profile.architecture} can't run through the transformers fallback: in layer {layer} its {what} "
                    f"is {found}, the engine would use {expected}"
                )


def register() -> None:
    """Make `NAME` known to transformers, whose models refuse an attention that isn't; harmless when repeated."""
    ALL_ATTENTION_FUNCTIONS.register(NAME, _attention)


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **given: Any
) -> tuple[Tensor, None]:
    binding: Any = module.engine_binding
    return binding.attend(module, query, key, value, attention_mask, **given), None


__all__ = ["NAME", "Binding", "register"]
