"""Text of a growing list of tokens, a piece at a time.

Whatever the split, the pieces together are what decoding all tokens at once gives; a character that may still be
completed is held back. One detokenizer per choice; costs about a microsecond a token.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence, Set
from typing import Final

from engine.token_bytes import Alphabet
from engine.tokenizer import Tokenizer

_BROKEN: Final = "�"


class _Stream(ABC):
    @abstractmethod
    def push(self, ids: Sequence[int]) -> str:
        """Text that these tokens complete."""

    @abstractmethod
    def flush(self) -> str:
        """The text held back, broken characters as U+FFFD."""


class Detokenizer:
    """Turns tokens into text as they come. Of the special tokens that are skipped, those in `keep` are text."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, keep: Set[int] = frozenset()) -> None:
        skipped = tokenizer.special_ids - keep if skip_special_tokens else frozenset[int]()
        alphabet = tokenizer.alphabet
        self._stream: _Stream
        if alphabet is None:
            self._stream = _WholeText(tokenizer, skipped)
        elif alphabet.pieces:
            self._stream = _Pieces(alphabet, skipped)
        else:
            self._stream = _ByteLevel(alphabet, skipped)

    def push(self, ids: Sequence[int]) -> str:
        """The text that these further tokens complete; may be empty."""
        return self._stream.push(ids)

    def flush(self) -> str:
        """The rest, when no more tokens come: bytes of unfinished characters become U+FFFD."""
        return self._stream.flush()


class _ByteLevel(_Stream):
    """Every token is bytes; UTF-8 is decoded across their borders."""

    def __init__(self, alphabet: Alphabet, skipped: frozenset[int]) -> None:
        self._bytes = alphabet.token_bytes
        self._skipped = skipped
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._utf8.decode(b"".join([self._bytes(token) for token in ids if token not in self._skipped]))

    def flush(self) -> str:
        return self._utf8.decode(b"", True)


class _Pieces(_Stream):
    """Tokens are text or single bytes. A run of bytes is text only if all of it is UTF-8, so it is held to its end."""

    def __init__(self, alphabet: Alphabet, skipped: frozenset[int]) -> None:
        self._alphabet = alphabet
        self._skipped = skipped
        self._run = b""
        self._strip = alphabet.strip  # spaces still to be taken off the front

    def push(self, ids: Sequence[int]) -> str:
        texts: list[str] = []
        for token in ids:
            data = self._alphabet.token_bytes(token)
            if not data or token in self._skipped:
                continue
            if self._alphabet.is_byte(token):
                self._run += data
            else:
                texts += (self._end_run(), data.decode())
        return self._stripped("".join(texts))

    def flush(self) -> str:
        return self._stripped(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, b""
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _BROKEN * len(run)

    def _stripped(self, text: str) -> str:
        while self._strip and text:
            if text[0] != " ":
                self._strip = 0
            else:
                text, self._strip = text[1:], self._strip - 1
        return text


class _WholeText(_Stream):
    """For decoders that can't work a token at a time: decodes everything again and hands out what is new."""

    def __init__(self, tokenizer: Tokenizer, skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._ids: list[int] = []
        self._sent = 0  # characters

    def push(self, ids: Sequence[int]) -> str:
        self._ids += [token for token in ids if token not in self._skipped]
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return self._advance(text.rstrip(_BROKEN), text)

    def flush(self) -> str:
        text = self._tokenizer.decode(self._ids, skip_special_tokens=False)
        return self._advance(text, text)

    def _advance(self, settled: str, text: str) -> str:
        fresh = text[self._sent : len(settled)]
        self._sent = max(self._sent, len(settled))
        return fresh


__all__ = ["Detokenizer"]
