"""What a speculator brings on this machine: acceptance by task and length of context, and speed by batch size.

Runs on an engine in this process. Acceptance is measured with drafts as long as they may be in every step; speed with
the controller at work, in turns with the same requests without drafts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from engine.completion import Prompt
    from engine.drafting import Drafter
    from engine.llm import LLM

TASKS: Final[Mapping[str, Sequence[str]]] = {
    "chat": (
        "What should I think about before I move to another city?",
        "My plant has yellow leaves. What can I do?",
        "Tell me how a bicycle stays upright, in simple words.",
    ),
    "code": (
        "Write a Python function that merges two sorted lists.",
        "Write a Python class for a stack with push, pop and peek.",
        "Write a SQL query that counts the orders of each customer.",
    ),
    "edit": (
        "Rename the variable x to total and repeat the code:\n\ndef add(values):\n    x = 0\n    for value in values:\n"
        "        x = x + value\n    return x",
        "Repeat this list and put a dash before each line:\napples\npears\noranges\nbananas\ngrapes\ncherries\nplums",
        "Repeat this text word for word: The harbour lay quiet under the morning fog. Two boats came in, and one man "
        "waited at the pier with a lamp in his hand.",
    ),
    "list": (
        "List the months of the year with a short sentence about each.",
        "Name ten animals that live in the sea, and say what each eats.",
        "Give me eight ideas for a rainy afternoon.",
    ),
}
"""Prompts by kind of task."""


@dataclass(frozen=True, slots=True)
class Acceptance:
    """What became of the drafts for one kind of task."""

    speculator: str
    task: str
    context: int  # tokens that every prompt was filled up to; 0 if it was left as it is
    drafts: int
    drafted: int
    accepted: int

    @property
    def length(self) -> float | None:
        """Tokens that a verified draft brings; None without any."""
        return (self.accepted + self.drafts) / self.drafts if self.drafts else None

    @property
    def rate(self) -> float | None:
        """Share of the draft tokens that are kept."""
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class Speed:
    """Tokens per second without and with drafts, of each round."""

    speculator: str
    batch: int
    plain: list[float]
    drafted: list[float]
    state: str  # of the controller at the end

    @property
    def ratio(self) -> float:
        """Median of the rounds' ratios."""
        return median(b / a for a, b in zip(self.plain, self.drafted, strict=True))


def drafter_of(llm: LLM) -> Drafter:
    """The engine's drafter.

    Raises:
        ValueError: it has none.
    """
    if llm.engine.drafter is None:
        raise ValueError("this engine has no speculator; name one with --speculator, or in the configuration")
    return llm.engine.drafter


@contextmanager
def always_drafting(drafter: Drafter) -> Iterator[None]:
    """Meanwhile every step drafts as much as it may."""
    from engine.speculation.lengths import Lengths

    chosen, drafter.lengths = drafter.lengths, Lengths()
    try:
        yield
    finally:
        drafter.lengths = chosen


def acceptance(
    llm: LLM, tasks: Mapping[str, Sequence[str]], contexts: Sequence[int], max_tokens: int, done: Callable[[], None]
) -> Iterator[Acceptance]:
    """Let the model do every task greedily, at each length of context."""
    from engine.sampling_params import SamplingParams

    drafter, params = drafter_of(llm), SamplingParams(temperature=0.0, max_tokens=max_tokens)
    filler = "\n\n".join(text for texts in tasks.values() for text in texts)
    for context in contexts:
        for task, texts in tasks.items():
            before = drafter.counters.totals()
            with always_drafting(drafter):
                llm.generate([prompt(llm, filled(llm, text, filler, context)) for text in texts], params)
            after = drafter.counters.totals()
            yield Acceptance(drafter.name, task, context, *(b - a for a, b in zip(before, after, strict=True)))
            done()


def speeds(
    llm: LLM, texts: Sequence[str], batches: Sequence[int], rounds: int, max_tokens: int, done: Callable[[], None]
) -> Iterator[Speed]:
    """Every round first without drafts, then with them; a round before the first one isn't counted."""
    from engine.sampling_params import SamplingParams, Speculation

    drafter = drafter_of(llm)
    drafts = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    plain = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, speculation=Speculation(method="none")
    )
    for batch in batches:
        prompts = [prompt(llm, texts[i % len(texts)]) for i in range(batch)]
        measured: tuple[list[float], list[float]] = [], []
        for number in range(rounds + 1):
            for params, seconds in zip((plain, drafts), measured, strict=True):
                began = time.perf_counter()
                tokens = sum(len(got.token_ids) for got in llm.generate(prompts, params))
                if number:
                    seconds.append(tokens / (time.perf_counter() - began))
                done()
        state = drafter.lengths.stats().get("state", "fixed")
        yield Speed(drafter.name, batch, *measured, state)


def filled(llm: LLM, text: str, filler: str, context: int) -> str:
    """The text behind so much of the filler that it has about `context` tokens; itself if it has them."""
    missing = context - len(llm.tokenizer.encode(text))
    if missing <= 0:
        return text
    words = llm.tokenizer.encode(filler + "\n\n")
    notes = llm.tokenizer.decode((words * (missing // len(words) + 1))[:missing])
    return f"{notes}\n\n{text}"


def prompt(llm: LLM, text: str) -> Prompt:
    """As a user's turn if the model knows turns."""
    return [{"role": "user", "content": text}] if llm.tokenizer.has_chat_template else text


__all__ = ["TASKS", "Acceptance", "Speed", "acceptance", "always_drafting", "drafter_of", "filled", "speeds"]
