"""Perplexity of an engine on given texts: what rounding weights or inputs costs in quality."""

from __future__ import annotations

import math
from collections.abc import Sequence

from engine.engine import Engine
from engine.messages import Add
from engine.sampling_params import SamplingParams


def perplexity(engine: Engine, texts: Sequence[Sequence[int]]) -> float:
    """exp of the mean negative log-probability of every token but the first of each text (token ids)."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    for index, text in enumerate(texts):
        refusal = engine.add(Add(f"text-{index}", list(text), params))
        if refusal is not None:
            raise ValueError(f"text {index} was refused: {refusal.error}")
    surprises: list[float] = []
    while engine.has_work:
        for output in engine.step():
            surprises += [-entry.logprobs[0] for entry in output.prompt_logprobs or () if entry is not None]
    return math.exp(sum(surprises) / len(surprises))


__all__ = ["perplexity"]
