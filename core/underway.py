"""Prompts that begin alike and come at once: the first computes what they share, the others wait for it.

A prefix can be matched only once it is computed. Without this, requests that arrive together would all compute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from engine.request import Request, Status

LEAST: Final = 256
"""Tokens that waiting must spare; fewer are computed again sooner than waited for."""


@dataclass(frozen=True, slots=True)
class _Prompt:
    request: Request
    admission: int
    known: int  # tokens at its admission: once it has more, its prompt is computed

    @property
    def computing(self) -> bool:
        r = self.request
        return r.status is Status.RUNNING and r.admissions == self.admission and len(r.tokens) == self.known


class Underway:
    """Long prompts that running requests compute.

    Args:
        matched: how many leading tokens of a request the cache has.
    """

    def __init__(self, matched: Callable[[Request], int]) -> None:
        self._matched = matched
        self._prompts: dict[int, list[_Prompt]] = {}  # hash of the first tokens -> those that begin so

    def admitted(self, request: Request) -> None:
        """It is about to compute the rest of its tokens."""
        kept = {key: [p for p in prompts if p.computing] for key, prompts in self._prompts.items()}
        self._prompts = {key: prompts for key, prompts in kept.items() if prompts}
        if len(request.tokens) - request.num_computed >= LEAST:
            prompt = _Prompt(request, request.admissions, len(request.tokens))
            self._prompts.setdefault(_opening(request), []).append(prompt)

    def computes(self, request: Request) -> bool:
        """Whether somebody computes so much of what this request begins with that it should wait."""
        if not self._prompts or len(request.tokens) <= LEAST:
            return False
        prompts = [prompt for prompt in self._prompts.get(_opening(request), ()) if prompt.computing]
        wanted = self._matched(request) + LEAST if prompts else 0
        return any(
            wanted < len(request.tokens)
            and wanted <= prompt.known
            and prompt.request.tokens[:wanted] == request.tokens[:wanted]
            for prompt in prompts
        )


def _opening(request: Request) -> int:
    return hash((request.cache_salt, *request.tokens[:LEAST]))


__all__ = ["LEAST", "Underway"]
