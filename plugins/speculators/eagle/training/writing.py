"""The target writes its own training text: many conversations at once, one token of each in every step.

A row goes on for a fixed number of steps. In a conversation the target plays both sides: when it ends a turn, or the
turn has grown too long, the words between two turns are put in by force, and it goes on in the other role.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from engine.errors import ConfigError
from engine.plugins.speculators.eagle.training.target import Target

USER: Final = 0
ASSISTANT: Final = 1

MIN_P: Final = 0.03
"""Tokens less likely than this share of the likeliest one are never drawn: the tail of a small model is noise."""

PREFILL_TOKENS: Final = 32768


@dataclass(frozen=True, slots=True, kw_only=True)
class Opening:
    """How a row begins: its first tokens, and who is speaking at their end. `turns` is False for text without roles."""

    tokens: Sequence[int]
    speaker: int = USER
    turns: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Scripts:
    """What stands between two turns: token ids after the user's and after the assistant's words.

    The first token of each is the one by which the model itself ends a turn; so are `ends`.
    """

    after: tuple[Sequence[int], Sequence[int]]
    ends: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Rows of tokens."""

    tokens: np.ndarray  # int32 [R, T]
    starts: np.ndarray  # int32 [R], tokens of the opening
    spoken: np.ndarray  # bool [R, T], words of the assistant, or of a row without roles
    steps: int  # tokens written in each row; what lies behind them is padding


class Writer:
    """Continues openings, `steps` tokens each.

    Args:
        temperatures: float32 [R, 2], of the user's and the assistant's words in each row; 0 is greedy.
        limits: int64 [R, 2], most tokens of a turn.
        seed: of the draws.
        graph: whether the step is captured as a CUDA graph.

    Raises:
        ConfigError: rows would be longer than the target's context.
    """

    def __init__(
        self,
        target: Target,
        openings: Sequence[Opening],
        scripts: Scripts,
        temperatures: Tensor,
        limits: Tensor,
        *,
        steps: int,
        seed: int,
        graph: bool,
    ) -> None:
        self._target, self._steps, self._graph = target, steps, graph
        device, rows = target.device, len(openings)
        torch.manual_seed(seed)
        self._starts = np.array([len(o.tokens) for o in openings], dtype=np.int32)
        self._length = int(self._starts.max()) + steps
        if self._length > target.profile.max_context:
            raise ConfigError(
                f"rows of {self._length:,} tokens (openings of up to {self._starts.max():,}, {steps:,} written) are "
                f"beyond the target's context of {target.profile.max_context:,}; have fewer written in each"
            )
        self._rows = torch.arange(rows, device=device)
        self._written = torch.zeros(rows, self._length, dtype=torch.int32, device=device)
        self._spoken = torch.zeros(rows, self._length, dtype=torch.bool, device=device)
        for row, opening in enumerate(openings):
            self._written[row, : len(opening.tokens)] = torch.tensor(opening.tokens, dtype=torch.int32)
        self._at = torch.from_numpy(self._starts).to(device).long() - 1  # position of the newest token
        self._speaker = torch.tensor([o.speaker for o in openings], device=device)
        self._turns = torch.tensor([o.turns for o in openings], device=device)
        self._forced = torch.zeros(rows, dtype=torch.int64, device=device)  # place in the script; 0: speaks freely
        self._said = torch.zeros(rows, dtype=torch.int64, device=device)
        self._temperatures, self._limits = temperatures.to(device), limits.to(device)
        longest = max(len(script) for script in scripts.after)
        padded = [[*script, *[0] * (longest - len(script))] for script in scripts.after]
        self._script = torch.tensor(padded, device=device)
        self._script_len = torch.tensor([len(script) for script in scripts.after], device=device)
        self._ends = torch.tensor([*scripts.ends, *(script[0] for script in scripts.after)], device=device)

    @torch.no_grad()
    def write(self, progress: Callable[[int], None] = lambda steps: None) -> Written:
        """Write all; `progress` is told of the steps done."""
        self._target.reserve(len(self._starts), self._length)
        self._prefill()
        step = self._captured() if self._graph else self._step
        for done in range(self._steps):
            step(self._starts + done)
            progress(done + 1)
        spoken = self._spoken.cpu().numpy()
        return Written(tokens=self._written.cpu().numpy(), starts=self._starts, spoken=spoken, steps=self._steps)

    def _prefill(self) -> None:
        """Compute the openings, all but their last token, a few rows at a time."""
        counts, at = self._starts - 1, 0
        while at < len(counts):
            end = at + 1
            while end < len(counts) and counts[at : end + 1].sum() <= PREFILL_TOKENS:
                end += 1
            some = counts[at:end]
            tokens = torch.cat([self._written[row, : counts[row]] for row in range(at, end)]).long()
            starts = torch.zeros(end - at, dtype=torch.int64, device=self._target.device)
            self._target.forward(tokens, self._target.batch(self._rows[at:end], starts, some, some))
            at = end

    def _captured(self) -> Callable[[np.ndarray], Any]:
        """The step as a CUDA graph; what it reads and changes lies in the same tensors ever after."""
        kept = [x.clone() for x in self._state()]
        most = np.full(len(self._starts), self._length, dtype=np.int32)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(most)  # compiles kernels
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._step(most)
        for now, before in zip(self._state(), kept, strict=True):
            now.copy_(before)
        return lambda ends: graph.replay()

    def _state(self) -> list[Tensor]:
        return [self._written, self._spoken, self._at, self._speaker, self._forced, self._said]

    def _step(self, ends: np.ndarray) -> None:
        """One token of every row; `ends` int32 [R] are the lengths, the newest token included."""
        target, rows = self._target, self._rows
        newest = self._written[rows, self._at].long()
        ones = np.ones(len(ends), dtype=np.int32)
        hidden = target.forward(newest, target.batch(rows, self._at, ones, ends))
        assert isinstance(hidden, Tensor)
        drawn = draw(target.logits(hidden), self._temperatures[rows, self._speaker])
        self._take(drawn)

    def _take(self, drawn: Tensor) -> None:
        """Append the drawn tokens int64 [R], or what the script says."""
        rows, speaker, free = self._rows, self._speaker, self._forced == 0
        ended = (drawn[:, None] == self._ends).any(-1) | (self._said + 1 >= self._limits[rows, speaker])
        over = free & self._turns & ended
        token = torch.where(free & ~over, drawn, self._script[speaker, self._forced])
        self._at += 1
        self._written[rows, self._at] = token.int()
        self._spoken[rows, self._at] = free & ((speaker == ASSISTANT) | ~self._turns)
        place = torch.where(free, over.long(), self._forced + 1)
        done = (place > 0) & (place >= self._script_len[speaker])
        self._said.copy_(torch.where(free, self._said + 1, 0))
        self._speaker.copy_(torch.where(done, 1 - speaker, speaker))
        self._forced.copy_(torch.where(done, 0, place))


def draw(logits: Tensor, temperatures: Tensor) -> Tensor:
    """One token per row of float32 [R, vocab] at temperatures [R]: Gumbel's maximum over the tokens above MIN_P."""
    heat = temperatures[:, None]
    least = logits.amax(-1, keepdim=True) + heat * float(np.log(MIN_P))
    noise = torch.empty_like(logits).exponential_().log_().mul_(heat)
    return torch.sub(logits, noise, out=noise).masked_fill_(logits < least, -torch.inf).argmax(-1)


__all__ = ["ASSISTANT", "USER", "Opening", "Scripts", "Writer", "Written", "draw"]
