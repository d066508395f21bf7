"""Trains several heads at once on the same batches, and can stop and go on."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.errors import ResourceError
from engine.plugins.speculators.eagle.training.config import ScheduleSection
from engine.plugins.speculators.eagle.training.dataset import Batches
from engine.plugins.speculators.eagle.training.loss import teach
from engine.plugins.speculators.eagle.training.student import Student
from engine.plugins.speculators.eagle.training.target import States, Target

Report = Callable[[int, float, Mapping[str, tuple[float, Sequence[float]]]], None]
"""Steps done, the share of the schedule, and per head its loss and how often each step was right."""

REPORT_EVERY = 10


class Trainer:
    """One run.

    Args:
        taps: the layers whose incoming states the heads are made for.
        ids: int64 [draft_vocab], ascending.
        checkpoint: a file to go on from if it exists, and to write.
    """

    def __init__(
        self,
        target: Target,
        students: Sequence[Student],
        batches: Batches,
        section: ScheduleSection,
        *,
        taps: Sequence[int],
        ids: Tensor,
        checkpoint: Path,
    ) -> None:
        self._target, self._students, self._batches, self._section = target, students, batches, section
        self._taps, self._ids, self._checkpoint = tuple(taps), ids, checkpoint
        self._dtype = getattr(torch, target.composition.dtype)
        self.done = 0
        if checkpoint.exists():
            self._restore()
        else:
            self._begin()

    def run(self, report: Report = lambda step, share, heads: None) -> None:
        """Train to the end of the schedule. However it ends, the checkpoint is written."""
        began = time.monotonic()
        try:
            while (share := self._share(time.monotonic() - began)) < 1:
                learnt = self._step(share)
                self.done += 1
                if self.done % REPORT_EVERY == 0:
                    heads = {name: (float(loss), right.tolist()) for name, (loss, right) in learnt.items()}
                    report(self.done, share, heads)
                if self.done % self._section.checkpoint_every == 0:
                    self.save()
        finally:
            self.save()

    def _share(self, seconds: float) -> float:
        minutes = self._section.minutes
        return max(self.done / self._section.steps, seconds / 60 / minutes if minutes else 0.0)

    def _step(self, share: float) -> dict[str, tuple[Tensor, Tensor]]:
        section, batch = self._section, self._batches.at(self.done)
        states = states_of(self._target, batch.tokens, self._taps)
        taught = torch.from_numpy(batch.taught).to(self._target.device)
        most = max(student.section.steps for student in self._students)
        lesson = teach(self._target, states, taught, self._ids, most, self._dtype, section.temperature)
        if not len(lesson.row):
            return {}
        rate = section.learning_rate * min(1.0, (self.done + 1) / (section.warmup + 1)) * falling(share)
        return {student.name: student.learn(lesson, rate, section.clip) for student in self._students}

    def _begin(self) -> None:
        """Start new heads from the target's output layer, which the logits of unit vectors are."""
        device, profile = self._target.device, self._target.profile
        final = states_of(self._target, self._batches.at(0).tokens, self._taps).final.flatten(0, 1)
        units = torch.eye(profile.hidden_size, device=device, dtype=final.dtype)
        output = self._target.logits(units)[:, self._ids].T.contiguous()
        for student in self._students:
            if student.section.start is None:
                student.take_after(output, final)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {k: v.detach().cpu().contiguous() for s in self._students for k, v in s.state().items()}
        self._checkpoint.parent.mkdir(parents=True, exist_ok=True)
        unfinished = self._checkpoint.with_suffix(".new")
        save_file(state, unfinished, {"progress": json.dumps({"done": self.done})})
        unfinished.replace(self._checkpoint)

    def _restore(self) -> None:
        try:
            with safe_open(self._checkpoint, "pt") as file:
                self.done = int(json.loads(file.metadata()["progress"])["done"])
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            for student in self._students:
                student.restore(state)
        except (SafetensorError, OSError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ResourceError(
                f"{self._checkpoint} is no checkpoint of these heads: {error}; delete it to begin again"
            ) from None


@torch.no_grad()
def states_of(target: Target, tokens: np.ndarray, taps: Sequence[int]) -> States:
    """The target's states of rows int32 [B, T]: each [B, T, …], fit for autograd."""
    rows, length = tokens.shape
    target.reserve(rows, length)
    counts = np.full(rows, length, dtype=np.int32)
    on_device = torch.arange(rows, device=target.device)
    ragged = torch.from_numpy(tokens).to(target.device).long().flatten()
    states = target.forward(ragged, target.batch(on_device, torch.zeros_like(on_device), counts, counts), taps)
    assert isinstance(states, States)
    return States(*(part.view(rows, length, *part.shape[1:]) for part in states))


def falling(share: float) -> float:
    """Half a cosine, from 1 at the start to 0 at the end."""
    return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))


__all__ = ["Report", "Trainer", "falling", "states_of"]
