"""Extension point: grammars, which say what tokens may follow so that a text keeps the form that was asked for.

The runner follows each constrained request with a matcher, and puts its mask over the logits before sampling.

Threads: `compile` runs on a thread of its own while the request waits in the queue. Masks are filled on another thread
while the forward pass runs; each matcher is used by one thread at a time.

Errors: `compile` raises ValueError for a constraint that the client got wrong, and `fill` for a limit that was passed:
the request alone ends with that sentence.

`build(options, *, tokens: TokenTable) -> GrammarBackend`, at the first request that asks for it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from engine.hooks import hookspec
from engine.plugin import Offer
from engine.structured import Structured

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

API: Final = 1
HOOK: Final = "grammars"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenTable:
    """What the tokens of a model spell."""

    tokens: Sequence[bytes]  # by id; empty for ids that no tokenizer knows, which are never allowed
    special: Mapping[str, int]  # control tokens by their text; they are not text, whatever they spell
    ends: tuple[int, ...]  # ids that end a text; at least one
    encode: Callable[[str], list[int]]

    @property
    def words(self) -> int:
        """32-bit words that a mask has."""
        return -(-len(self.tokens) // 32)


class Matcher(ABC):
    """Follows one text, token by token. Used by one thread at a time."""

    @abstractmethod
    def fill(self, mask: NDArray[np.int32]) -> None:
        """Say what may follow: bit `i % 32` of word `i // 32` of `mask` [words] is 1 if token i may, else 0.

        End tokens may follow wherever the text may end, and nothing else once it can't go on. Should release the
        interpreter lock.

        Raises:
            ValueError: a limit of the component was passed; the sentence says which.
        """

    @abstractmethod
    def accept(self, token: int) -> bool:
        """Go on by one token. False, and nothing has changed, if the token may not follow; after an end none may.

        Raises:
            ValueError: as `fill` does.
        """

    @abstractmethod
    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens, an end token counting as one."""

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the text is complete and nothing but an end token can follow."""

    @abstractmethod
    def fork(self) -> Matcher:
        """An independent matcher in the same state. May be called from any thread while nobody else uses this one."""


class GrammarBackend(ABC):
    """Compiles constraints for one vocabulary."""

    @abstractmethod
    def compile(self, structured: Structured) -> Matcher:
        """A matcher at the beginning of a text; `after` of the constraint is the core's matter.

        May be called from several threads at once, and must release the interpreter lock while it works for long.

        Raises:
            ValueError: the constraint is malformed or asks for something unsupported, in a sentence for the client.
        """


BUILDS: Final = GrammarBackend


@hookspec
def grammars() -> Iterable[Offer[GrammarBackend]]:  # type: ignore[empty-body]
    """Offer grammar components. Must not import torch."""


__all__ = ["API", "HOOK", "GrammarBackend", "Matcher", "TokenTable", "grammars"]
