"""How the tokens of a tokenizer spell bytes: the part of decoding that can be done one token at a time.

Two alphabets cover the tokenizers of language models: byte-level BPE, where each character of a token stands for one
byte, and SentencePiece, where a token is text with ▁ for the space, or one byte written <0xAB>.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from tokenizers import Tokenizer as Backend

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")


def _byte_level() -> dict[str, int]:
    """GPT-2's table: printable Latin-1 characters stand for themselves, the other bytes for those from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_LEVEL: Final = _byte_level()


@dataclass(slots=True)
class Alphabet:
    """Looks tokens up and keeps what it found, so that a token costs one dictionary access from the second time on."""

    backend: Backend
    pieces: bool  # SentencePiece; else byte-level
    strip: int  # spaces that decoding takes off the front of a text
    _known: dict[int, bytes] = field(default_factory=dict)
    _singles: dict[int, bool] = field(default_factory=dict)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one token; empty beyond the vocabulary."""
        found = self._known.get(token)
        return self._look_up(token) if found is None else found

    def is_byte(self, token: int) -> bool:
        """Whether a SentencePiece token is a single byte, whose meaning its neighbours decide."""
        if token not in self._singles:
            text = self.backend.id_to_token(token)
            self._singles[token] = self.pieces and text is not None and _BYTE_TOKEN.fullmatch(text) is not None
        return self._singles[token]

    def _look_up(self, token: int) -> bytes:
        text = self.backend.id_to_token(token)
        if text is None:
            found = b""
        elif not self.pieces:
            codes = [_BYTE_LEVEL.get(char) for char in text]
            found = text.encode() if None in codes else bytes(code for code in codes if code is not None)
        elif (byte := _BYTE_TOKEN.fullmatch(text)) is not None:
            found = bytes([int(byte[1], 16)])
        else:
            found = text.replace("▁", " ").encode()
        self._known[token] = found
        return found


def alphabet_of(backend: Backend) -> Alphabet | None:
    """The alphabet of a tokenizer, told by its decoder; None when it decodes in some other way."""
    if backend.decoder is None:
        return None
    decoder = json.loads(backend.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return Alphabet(backend, pieces=False, strip=0)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and _is_space(steps[0]):
        if len(steps) == 3:
            return Alphabet(backend, pieces=True, strip=0)
        if kinds[3:] == ["Strip"] and steps[3]["content"] == " " and steps[3]["stop"] == 0:
            return Alphabet(backend, pieces=True, strip=steps[3]["start"])
    return None


def _is_space(step: Mapping[str, Any]) -> bool:
    return bool(step["pattern"] == {"String": "▁"} and step["content"] == " ")


__all__ = ["Alphabet", "alphabet_of"]
