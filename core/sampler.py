"""From logits to tokens, for a batch of rows that each follow their own sampling parameters.

Works on plain tensors and knows neither slots nor steps. The order is: bias and bans, penalties, temperature, min-p,
top-k, top-p, then one draw by inversion of the cumulative distribution in order of token id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from engine.messages import TokenLogprobs
from engine.randomness import uniform
from engine.sampling_params import SamplingParams

_CANDIDATES = 256
"""How many of the most likely tokens are sorted before a whole row is; nearly always enough for top-p."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row of logits to sample from."""

    params: SamplingParams
    seed: int
    position: int  # of the token to be sampled
    history: np.ndarray  # token ids before it
    prompt_len: int
    banned: tuple[int, ...] = ()  # ids that may not be sampled here, unless nothing else is left
    mask: Tensor | None = None  # what the form of the text leaves, see `forbid`

    @property
    def reshaped(self) -> bool:
        """Whether the logits change before they are compared."""
        p = self.params
        penalized = p.repetition_penalty != 1.0 or p.presence_penalty != 0.0 or p.frequency_penalty != 0.0
        chosen = p.logit_bias or p.allowed_token_ids or p.bad_word_ids or self.banned
        return bool(penalized or chosen or self.mask is not None)


def reshape(logits: Tensor, row: Row) -> None:
    """Apply bias, bans and penalties to one row of logits [vocab] in place.

    Repetition counts prompt and output (Keskar et al., 2019); presence and frequency count the output only (OpenAI).
    """
    p = row.params
    if p.allowed_token_ids:
        known = [t for t in p.allowed_token_ids if 0 <= t < logits.numel()]
        allowed = torch.tensor(known, dtype=torch.long, device=logits.device)
        kept = logits[allowed].clone()
        logits.fill_(-torch.inf)
        logits[allowed] = kept
    if p.logit_bias:
        pairs = [(t, b) for t, b in p.logit_bias.items() if 0 <= t < logits.numel()]
        ids = torch.tensor([t for t, _ in pairs], dtype=torch.long, device=logits.device)
        logits[ids] += torch.tensor([b for _, b in pairs], dtype=logits.dtype, device=logits.device)
    if p.repetition_penalty != 1.0:
        seen = torch.from_numpy(np.unique(row.history)).long().to(logits.device)
        values = logits[seen]
        logits[seen] = torch.where(values > 0, values / p.repetition_penalty, values * p.repetition_penalty)
    if p.presence_penalty or p.frequency_penalty:
        ids_np, counts = np.unique(row.history[row.prompt_len :], return_counts=True)
        seen = torch.from_numpy(ids_np).long().to(logits.device)
        logits[seen] -= p.presence_penalty + p.frequency_penalty * torch.from_numpy(counts).to(logits)
    if row.mask is not None:
        forbid(logits, row.mask)
    if banned := {*row.banned, *endings(p.bad_word_ids, row)}:
        _ban(logits, sorted(t for t in banned if t < logits.numel()), row)


def forbid(logits: Tensor, mask: Tensor) -> None:
    """Put -inf where a mask has a 0, in place.

    Args:
        logits: [vocab].
        mask: int32 [words]; ids beyond its end are forbidden.
    """
    bits = (mask.unsqueeze(1) >> torch.arange(32, dtype=torch.int32, device=mask.device)) & 1
    allowed = bits.flatten()[: logits.numel()].bool()
    logits[: allowed.numel()].masked_fill_(~allowed, -torch.inf)
    logits[allowed.numel() :] = -torch.inf


def _ban(logits: Tensor, ids: list[int], row: Row) -> None:
    """Put -inf at ids, unless nothing else is left."""
    banned = torch.tensor(ids, dtype=torch.long, device=logits.device)
    kept = logits[banned].clone()
    logits[banned] = -torch.inf
    narrow = row.mask is not None or row.params.allowed_token_ids
    if narrow and not bool((logits > -torch.inf).any()):
        logits[banned] = kept


def endings(words: Sequence[Sequence[int]], row: Row) -> list[int]:
    """The last tokens of those words whose tokens before the last are the end of the row's output."""
    output = row.history[row.prompt_len :].tolist() if any(len(word) > 1 for word in words) else []
    return [w[-1] for w in words if len(w) == 1 or output[1 - len(w) :] == list(w[:-1])]


def distribution(logits: Tensor, rows: Sequence[Row]) -> Tensor:
    """The distributions that the rows sample from: float32 [N, vocab], each summing to 1.

    `logits` [N, vocab] float32 are those of `reshape`. Greedy rows are point masses on the first maximum.
    """
    temperature = torch.tensor([r.params.temperature or 1.0 for r in rows], device=logits.device).unsqueeze(1)
    temperature.clamp_(min=torch.finfo(temperature.dtype).tiny)  # what rounds to zero would make 0 / 0 of the peak
    peak = logits.amax(-1, keepdim=True)
    probs = torch.softmax((logits - peak) / temperature, -1)
    for i, row in enumerate(rows):
        p = row.params
        if p.greedy:
            best = int(logits[i].argmax())
            probs[i].zero_()
            probs[i, best] = 1.0
        elif p.min_p > 0.0 or p.top_k > 0 or p.top_p < 1.0:
            _truncate(probs[i], p)
    return probs


def _truncate(probs: Tensor, p: SamplingParams) -> None:
    """Keep the tokens that min-p, top-k and top-p leave of one row [vocab], renormalized, in place."""
    vocab = probs.numel()
    count = min(vocab, max(p.top_k, _CANDIDATES))
    while True:
        top, ids = torch.topk(probs, count)
        keep = top >= p.min_p * top[0]
        if p.top_k > 0:
            keep[p.top_k :] = False
        complete = count == vocab or not keep[-1]  # every token that min-p and top-k leave is among `top`
        mass = torch.where(keep, top, 0.0).double()
        total = mass.sum() if complete else probs.double().sum()
        nucleus = keep & (torch.cumsum(mass, 0) - mass < p.top_p * total)
        if complete or (p.min_p == 0.0 and not nucleus[-1]):
            break
        count = min(vocab, count * 8)
    kept = torch.where(nucleus, top, 0.0)
    probs.zero_()
    probs[ids] = kept / kept.sum()


def draw(probs: Tensor, uniforms: Sequence[float]) -> list[int]:
    """One token per row of probs [N, vocab], by inversion at the given numbers in [0, 1)."""
    cumulative = torch.cumsum(probs.double(), -1)
    targets = torch.tensor(uniforms, dtype=torch.float64, device=probs.device).unsqueeze(1) * cumulative[:, -1:]
    return [
        int(t) for t in torch.searchsorted(cumulative, targets, right=True).squeeze(1).clamp(max=probs.shape[1] - 1)
    ]


def maxima(logits: Tensor) -> list[int]:
    """The most likely token of each row."""
    tokens: list[int] = logits.argmax(-1).tolist()
    return tokens


def sample(logits: Tensor, rows: Sequence[Row], best: Callable[[Tensor], list[int]] = maxima) -> list[int]:
    """One token per row. logits: float32 [N, vocab], overwritten where a row reshapes them; `best` is as `maxima`."""
    for i, row in enumerate(rows):
        if row.reshaped:
            reshape(logits[i], row)
    tokens = best(logits)
    drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
    if drawn:
        chosen = [rows[i] for i in drawn]
        probs = distribution(logits[drawn], chosen)
        for i, token in zip(drawn, draw(probs, [uniform(r.seed, r.position) for r in chosen]), strict=True):
            tokens[i] = token
    return tokens


def top_logprobs(logits: Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    """Log-probabilities of the chosen tokens and of the best `counts[i]` in each row of raw logits [N, vocab]."""
    logprobs = torch.log_softmax(logits, -1)
    ids = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    chosen = logprobs.gather(1, ids)
    ranks = (logprobs > chosen).sum(-1) + 1
    most = max(counts, default=0)
    values, best = torch.topk(logprobs, most) if most else (logprobs[:, :0], ids[:, :0])
    columns = zip(token_ids, chosen[:, 0].tolist(), ranks.tolist(), best.tolist(), values.tolist(), counts, strict=True)
    return [TokenLogprobs([t, *b[:n]], [c, *v[:n]], rank) for t, c, rank, b, v, n in columns]


__all__ = ["Row", "distribution", "draw", "endings", "forbid", "maxima", "reshape", "sample", "top_logprobs"]
