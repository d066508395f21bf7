"""Requests whose constraint is being compiled: they wait in the queue, and are refused if that fails or takes too long.

Called on the scheduler's thread only.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from engine.grammars import Grammars
from engine.request import Request, Status
from engine.specs.grammar import Matcher
from engine.structured import Structured


@dataclass(slots=True)
class _Wait:
    request: Request
    compiled: Future[Matcher]
    deadline: float  # seconds, monotonic


class Compiling:
    """Between queue and grammar component.

    Args:
        grammars: None when this engine has no grammar component; constraints are then refused.
    """

    def __init__(self, grammars: Grammars | None = None) -> None:
        self._grammars = grammars
        self._waits: list[_Wait] = []

    def fault(self, structured: Structured | None) -> str | None:
        """Why a constraint is refused unseen, in one sentence."""
        if structured is None:
            return None
        if self._grammars is None:
            return "structured output needs a grammar component, and this server has none; ask for plain text"
        return self._grammars.fault(structured)

    def start(self, request: Request, now: float) -> None:
        """Compile what a request asks for, if it does; `now` is monotonic seconds."""
        if request.params.structured is None or self._grammars is None:
            return
        request.constraint = self._grammars.submit(request.params.structured)
        request.compiling = True
        self._waits.append(_Wait(request, request.constraint, now + self._grammars.limits.compile_seconds))

    def advance(self, now: float) -> list[tuple[Request, str]]:
        """Let requests in whose constraint is compiled; returns those that must end, with the reason for the client."""
        refused, waits = [], []
        for wait in self._waits:
            if wait.request.status is Status.FINISHED:
                continue
            if wait.compiled.done():
                error = wait.compiled.exception()
                if error is not None:
                    refused.append((wait.request, _refusal(wait.request, error)))
                wait.request.compiling = False
            elif now >= wait.deadline:
                refused.append((wait.request, f"{_what(wait.request)} could not be compiled in time; make it simpler"))
            else:
                waits.append(wait)
        self._waits = waits
        return refused

    def close(self) -> None:
        """End the compilers."""
        if self._grammars is not None:
            self._grammars.close()


def _what(request: Request) -> str:
    assert request.params.structured is not None, "only constrained requests are compiled"
    return f"the {request.params.structured.kind}"


def _refusal(request: Request, error: BaseException) -> str:
    if isinstance(error, ValueError):
        return f"{_what(request)} can't be used: {error}"
    return f"{_what(request)} can't be used: the grammar component failed with {type(error).__name__}: {error}"


__all__ = ["Compiling"]
