"""Compiling constraints off the step's thread, and handing out matchers.

A request whose constraint is being compiled waits in the queue, and others pass it by. Equal constraints are compiled
once while any request has them, and the last ones are kept after that.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar
from weakref import WeakValueDictionary

from engine.specs.grammar import GrammarBackend, Matcher, TokenTable
from engine.structured import Structured

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

T = TypeVar("T")

_KEPT = 256
_COMPILERS = 2

FILLERS = 4
"""Threads that fill masks; a large batch is shared among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarLimits:
    """What a request may ask for."""

    max_size: int  # characters of a schema, pattern or grammar
    max_depth: int  # of nested objects and lists in a schema or tag
    compile_seconds: float


class Grammars:
    """One grammar component, its compilers' threads and what they made.

    Args:
        make_tokens: reads the vocabulary; called on a compiler's thread, at the first constraint.
        build: the component, from the vocabulary.
        wake: called from other threads when a constraint is compiled.
    """

    def __init__(
        self,
        make_tokens: Callable[[], TokenTable],
        build: Callable[[TokenTable], GrammarBackend],
        limits: GrammarLimits,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self.limits, self._make_tokens, self._build, self._wake = limits, make_tokens, build, wake
        self._pool = ThreadPoolExecutor(_COMPILERS, thread_name_prefix="grammar")
        self._masks = ThreadPoolExecutor(FILLERS, thread_name_prefix="masks")
        self._lock, self._making = threading.Lock(), threading.Lock()
        self._known: WeakValueDictionary[Structured, Future[Matcher]] = WeakValueDictionary()
        self._recent: OrderedDict[Structured, Future[Matcher]] = OrderedDict()

    @cached_property
    def tokens(self) -> TokenTable:
        """The vocabulary."""
        return self._make_tokens()

    @cached_property
    def _backend(self) -> GrammarBackend:
        return self._build(self.tokens)

    def prepare(self) -> Future[GrammarBackend]:
        """Begin to read the vocabulary now, instead of at the first constraint."""
        return self._pool.submit(self._ready)

    def fault(self, structured: Structured) -> str | None:
        """Why a constraint is refused unseen, in one sentence."""
        parts = structured.value if isinstance(structured.value, tuple) else (structured.value,)
        size, limits = sum(map(len, parts)), self.limits
        if size > limits.max_size:
            return f"the {structured.kind} has {size} characters, but at most {limits.max_size} are taken here"
        if structured.kind in ("json_schema", "structural_tag") and (depth := _depth(parts[0])) > limits.max_depth:
            return f"the {structured.kind} is nested {depth} deep, but at most {limits.max_depth} levels are taken here"
        return None

    def submit(self, structured: Structured) -> Future[Matcher]:
        """Start compiling, unless that was done. Whoever keeps the future keeps what comes of it."""
        with self._lock:
            future = self._known.get(structured)
            if future is None:
                future = self._pool.submit(self._compile, structured)
                future.add_done_callback(lambda _: self._wake())
                self._known[structured] = future
            self._recent[structured] = future
            self._recent.move_to_end(structured)
            if len(self._recent) > _KEPT:
                self._recent.popitem(last=False)
        return future

    def matcher(self, structured: Structured) -> Matcher:
        """A matcher at the beginning of a text; waits for the compiler if need be. Raises as `compile` does."""
        future = self.submit(structured)
        compiled = future.result()
        with self._lock:
            return compiled.fork()

    def _compile(self, structured: Structured) -> Matcher:
        return self._ready().compile(structured)

    def _ready(self) -> GrammarBackend:
        with self._making:
            return self._backend

    def aside(self, work: Callable[[], T]) -> Future[T]:
        """Do something on a thread that fills masks."""
        return self._masks.submit(work)

    def close(self) -> None:
        """End the threads; what is being compiled is waited for, what is queued isn't compiled any more."""
        self._pool.shutdown(cancel_futures=True)
        self._masks.shutdown()


def token_table(tokenizer: Tokenizer, vocab_size: int, ends: Sequence[int]) -> TokenTable:
    """The vocabulary of a model.

    Args:
        vocab_size: columns of its logits.
        ends: ids that end a text.

    Raises:
        ValueError: there are none.
    """
    if not ends:
        raise ValueError("structured output needs a model with an end-of-sequence token")
    known = min(vocab_size, tokenizer.vocab_size)
    return TokenTable(
        tokens=[tokenizer.token_bytes(token) for token in range(known)] + [b""] * (vocab_size - known),
        special={tokenizer.token_text(token): token for token in sorted(tokenizer.special_ids) if token < vocab_size},
        ends=tuple(ends),
        encode=tokenizer.encode,
    )


def _depth(text: str) -> int:
    """How deeply lists and objects are nested in a JSON text; 0 for what is no JSON, which the compiler refuses."""
    try:
        level, deepest = [json.loads(text)], 0
    except ValueError:
        return 0
    except RecursionError:
        return len(text)
    while level := [v for v in level if isinstance(v, dict | list)]:
        deepest += 1
        level = [inner for v in level for inner in (v.values() if isinstance(v, dict) else v)]
    return deepest


__all__ = ["FILLERS", "GrammarLimits", "Grammars", "token_table"]
