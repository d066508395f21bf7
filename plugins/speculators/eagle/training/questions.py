"""Questions for the target to answer, drawn from a file of patterns: `List {three|five} {birds|trees {in|of} Europe}.`

Each line is one pattern. `{a|b}` is one of its alternatives, which may hold further ones; `{number}` is a number from 2
to 99, `{passage}` a paragraph of the training texts; `{@topic}` and `{@sentence}` are drawn from lists of that name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Final

from engine.errors import ConfigError

_INNERMOST: Final = re.compile(r"\{([^{}]*)\}")
_PARAGRAPH: Final = re.compile(r"[A-Z][^{}<>|=_#\n]{40,}(?:\n[^{}<>|=_#\n]{20,}){0,8}\n")
_PASSAGE_WORDS: Final = (20, 110)


class Questions:
    """Draws questions.

    Args:
        patterns: lines; blank ones are left out.
        lists: words for `{@name}`.
        texts: what passages are taken from.

    Raises:
        ConfigError: a pattern has unequal brackets, a list that there is none of, or a passage where no text has one.
    """

    def __init__(
        self,
        patterns: Sequence[str],
        lists: Mapping[str, Sequence[str]],
        texts: Sequence[str],
        draws: random.Random,
    ) -> None:
        self._random, self._lists = draws, lists
        self._patterns = [pattern for pattern in patterns if pattern.strip()]
        self._passages = passages(texts) if any("{passage}" in pattern for pattern in self._patterns) else []
        for pattern in self._patterns:
            self._fill(pattern)

    def draw(self) -> str:
        """One question."""
        return self._fill(self._random.choice(self._patterns))

    def _fill(self, pattern: str) -> str:
        text, passage = pattern.replace("\\n", "\n"), ""
        while found := _INNERMOST.search(text):
            inner = found[1]
            if inner == "passage":
                if not self._passages:
                    raise ConfigError(f"no file of data.texts has a paragraph for {pattern!r}")
                passage, inner = self._random.choice(self._passages), "\0"  # its own brackets mean nothing
            else:
                inner = self._chosen(pattern, inner)
            text = text[: found.start()] + inner + text[found.end() :]
        if "{" in text or "}" in text:
            raise ConfigError(f"data.questions: unequal brackets in {pattern!r}")
        return text.replace("\0", passage)

    def _chosen(self, pattern: str, inner: str) -> str:
        if inner == "number":
            return str(self._random.randint(2, 99))
        if inner.startswith("@"):
            if inner[1:] not in self._lists:
                raise ConfigError(
                    f"data.questions: {pattern!r} names the list {inner}; there are {sorted(self._lists)}"
                )
            return self._random.choice(self._lists[inner[1:]])
        return self._random.choice(inner.split("|"))


def passages(texts: Sequence[str]) -> list[str]:
    """Paragraphs of prose, each on one line."""
    found = (" ".join(match[0].split()) for text in texts for match in _PARAGRAPH.finditer(text))
    low, high = _PASSAGE_WORDS
    return [text for text in found if low <= len(text.split()) <= high and text[-1] in ".!?"]


__all__ = ["Questions", "passages"]
