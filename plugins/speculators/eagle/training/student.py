"""One head while it learns: module, optimiser, and how both are written down."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from engine.plugins.speculators.eagle.files import HeadWeights, weight_file
from engine.plugins.speculators.eagle.module import EagleModule
from engine.plugins.speculators.eagle.shape import read_shape
from engine.plugins.speculators.eagle.training.config import HeadSection
from engine.plugins.speculators.eagle.training.loss import Lesson, unrolled_loss


class Student:
    """A head with AdamW; weights and moments are float32, products in `dtype`.

    Args:
        config: the head's `config.json`.
        ids: int64 [draft_vocab], ascending: what the head can draft.
    """

    def __init__(
        self,
        name: str,
        section: HeadSection,
        config: Mapping[str, Any],
        ids: Tensor,
        dtype: torch.dtype,
    ) -> None:
        self.name, self.section, self.config, self._dtype = name, section, dict(config), dtype
        shape = read_shape(config)
        self.head = EagleModule(shape, int(config["max_position_embeddings"])).to(ids.device)
        self.head.set_vocabulary(ids)
        self._optimizer = torch.optim.AdamW(
            self.head.parameters(), lr=0.0, betas=(0.9, 0.95), weight_decay=0.01, fused=ids.is_cuda
        )

    @torch.no_grad()
    def take_after(self, output: Tensor, final: Tensor) -> None:
        """Start from the target's own output layer.

        Args:
            output: float32 [draft_vocab, hidden], its rows.
            final: [T, hidden], states after its final norm; the rows take over their size in each dimension, halved
                so that the first guesses, which are wrong, are not too sure.
        """
        if output.shape == self.head.lm_head.weight.shape:
            self.head.lm_head.weight.copy_(output * final.float().pow(2).mean(0).sqrt() / 2)

    @torch.no_grad()
    def go_on(self, folder: Path) -> None:
        """Take the weights of a head of the same shape and vocabulary.

        Raises:
            ValueError, KeyError: it is another; the sentence names the file.
        """
        with closing(HeadWeights(weight_file(folder))) as source:
            for name, tensor in self.head.state_dict().items():
                if (found := source.shape(name)) != tuple(tensor.shape):
                    raise ValueError(f"{folder}: {name} has shape {list(found)}, this head's is {list(tensor.shape)}")
                tensor.copy_(source.get(name, tensor.dtype))

    def learn(self, lesson: Lesson, rate: float, clip: float) -> tuple[Tensor, Tensor]:
        """One step; returns the loss and float32 [steps], how often each step's first choice was the target's."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(self.head.d2t.device.type, self._dtype, enabled=self._dtype is not torch.float32):
            loss, right = unrolled_loss(self.head, lesson, self.section.steps)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), clip)
        self._optimizer.step()
        return loss.detach(), right

    def state(self) -> dict[str, Tensor]:
        """Everything that the next step depends on."""
        named = {f"{self.name}/head/{key}": value for key, value in self.head.state_dict().items()}
        for key, parameter in self.head.named_parameters():
            moments = self._optimizer.state.get(parameter, {})
            named |= {f"{self.name}/adam/{key}/{what}": value for what, value in moments.items()}
        return named

    @torch.no_grad()
    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take up what `state` told. Raises KeyError or RuntimeError if it was another head's."""
        device = self.head.d2t.device
        own = f"{self.name}/head/"
        self.head.load_state_dict({key[len(own) :]: value for key, value in state.items() if key.startswith(own)})
        for key, parameter in self.head.named_parameters():
            at = f"{self.name}/adam/{key}/"
            moments = {k[len(at) :]: v for k, v in state.items() if k.startswith(at)}
            self._optimizer.state[parameter] = {k: v.to(device) for k, v in moments.items()}

    def write(self, folder: Path) -> None:
        """The head in the public format: `config.json` and `model.safetensors`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config, indent=2) + "\n")
        weights = stored(self.head.state_dict(), self.section.storage)
        (folder / "model.safetensors").write_bytes(save(weights))


def stored(weights: Mapping[str, Tensor], storage: str) -> dict[str, Tensor]:
    """Weights as a file keeps them. With int8 each matrix X.weight has codes and float32 [rows, 1] X.weight_scale."""
    found: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        here = tensor.detach().cpu().contiguous()
        if not here.is_floating_point():
            found[name] = here
        elif storage == "int8" and here.dim() == 2:
            scale = here.float().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            found[name] = (here.float() / scale).round().to(torch.int8)
            found[f"{name}_scale"] = scale
        else:
            found[name] = here.to(torch.float32 if storage == "int8" else getattr(torch, storage))
    return found


__all__ = ["Student", "stored"]
