"""The target of a head, outside of any engine: the parts that would serve it, driven by whole rows at once.

The model and the attention backend are the composed ones, so a head learns from the states that it will be served with.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from engine.composition import Composition
from engine.kv_memory import cut_pool
from engine.ops import select
from engine.specs.attention import AttentionBackend, AttentionBatch, AttentionShape
from engine.specs.model import Forward, Model
from engine.tokenizer import Tokenizer


class States(NamedTuple):
    """What the target computes of T tokens."""

    embeddings: Tensor  # [T, hidden]
    taps: Tensor  # [T, taps, hidden], the states that enter the tapped layers
    final: Tensor  # [T, hidden], after the final norm


class Watching(Forward):
    """Binds attention to a plan and the pages, and keeps the states that enter some layers."""

    def __init__(self, backend: AttentionBackend) -> None:
        self._backend = backend
        self.pool: Sequence[tuple[Tensor, ...]] = ()
        self.plan: Any = None
        self.wanted: frozenset[int] = frozenset()
        self.seen: dict[int, Tensor] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        return self._backend.forward(layer, q, k, v, self.pool[layer], self.plan)

    def tap(self, layer: int, hidden: Tensor) -> None:
        if layer in self.wanted:
            self.seen[layer] = hidden.clone()


class Target:
    """The composed model. Every row keeps its KV in pages of its own, one behind the other.

    Raises:
        ValueError, OSError, KeyError: the weights can't be read; the sentence names the file.
    """

    def __init__(self, composition: Composition) -> None:
        self.composition, self.profile = composition, composition.profile
        self.device = torch.device(composition.device.kind)
        self.page_size = composition.page_size
        self.backend: AttentionBackend = composition.choices["attention"].build(
            shape=AttentionShape.of(composition.profile, composition.dtype),
            page_size=self.page_size,
            device=composition.device,
        )
        self.tokenizer: Tokenizer = composition.choices["loader"].build().tokenizer(composition.model_path)
        self.model = self._load()
        self._step = Watching(self.backend)
        self._tables = torch.zeros(0, 0, dtype=torch.int32, device=self.device)

    def _load(self) -> Model:
        composition, choices = self.composition, self.composition.choices
        dtype: torch.dtype = getattr(torch, composition.dtype)
        weights = choices["loader"].build().open(composition.model_path, dict(composition.model_config))
        with closing(weights):
            model: Model = choices["model"].build(
                config=dict(composition.model_config),
                profile=self.profile,
                weights=weights,
                linears=choices["quantization"].build(device=composition.device, dtype=dtype),
                ops=select(composition.device, dtype),
                device=self.device,
                dtype=dtype,
            )
        return model

    def reserve(self, rows: int, length: int) -> None:
        """Make room for so many rows of at most `length` tokens; what was kept before is gone."""
        pages = -(-length // self.page_size)
        if not self._step.pool or len(self._step.pool[0][0]) < rows * pages:
            self.release()
            layout = self.backend.kv_layout()
            self._step.pool = cut_pool(layout, self.profile.layers, rows * pages, self.device)
        self._tables = torch.arange(rows * pages, dtype=torch.int32, device=self.device).view(rows, pages)

    def release(self) -> None:
        """Give up the memory of the rows."""
        self._step.pool = ()

    def batch(self, rows: Tensor, starts: Tensor, counts: np.ndarray, ends: np.ndarray) -> AttentionBatch:
        """Some of the rows, each with `counts` new tokens from position `starts` on.

        Args:
            rows: int64 [R]; starts: int64 [R], on the device.
            counts, ends: int32 [R]; `ends` may be larger than the truth where the backend reads lengths on the device.
        """
        single, every = bool((counts == 1).all()), torch.arange(len(counts) + 1, device=self.device)
        if single:  # nothing is copied from the host, so that a graph can hold it
            query_start, owner, positions, lengths = every.int(), every[:-1], starts, starts + 1
        else:
            on_device = torch.from_numpy(counts).to(self.device)
            query_start = run_starts(on_device)
            owner = torch.repeat_interleave(every[:-1], on_device, output_size=int(counts.sum()))
            positions = torch.arange(len(owner), device=self.device) - query_start[owner] + starts[owner]
            lengths = starts + on_device
        tables = self._tables[rows]
        pages = tables[owner, positions // self.page_size].long()
        return AttentionBatch(
            query_start=query_start,
            seq_lens=lengths.int(),
            block_tables=tables,
            slot_mapping=pages * self.page_size + positions % self.page_size,
            positions=positions,
            num_decodes=len(counts) if single else 0,
            query_lens_host=counts,
            seq_lens_host=ends,
        )

    @torch.no_grad()
    def forward(self, tokens: Tensor, batch: AttentionBatch, taps: Sequence[int] | None = None) -> States | Tensor:
        """Compute ragged tokens int64 [T] of a batch: their states, or without `taps` those after the final norm."""
        step = self._step
        step.plan, step.seen = self.backend.plan(batch), {}
        step.wanted = frozenset() if taps is None else frozenset((0, *taps))
        final = self.model.forward(tokens, batch.positions, step)
        if taps is None:
            return final
        return States(step.seen[0], torch.stack([step.seen[layer] for layer in taps], 1), final.clone())

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [N, vocab]; may be overwritten by the next call."""
        return self.model.logits(hidden)


def run_starts(counts: Tensor) -> Tensor:
    """int32 [R] -> int32 [R + 1]: where each request's tokens begin, and the end."""
    ends = counts.cumsum(0, dtype=torch.int32)
    return torch.cat((ends.new_zeros(1), ends))


__all__ = ["States", "Target"]
