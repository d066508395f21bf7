"""A tokenizer for tests: one token for each byte, so that lengths are known and characters come in pieces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from engine.tokenizer import Tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

EOS = 256
"""The end token of `byte_tokenizer`; tokens 0 to 255 are the bytes."""

_TEMPLATE = (
    "{%- for message in messages %}<{{ message.role }}>{{ message.content }}\n"
    "{%- if message.tool_calls %}{{ message.tool_calls | tojson }}\n{%- endif %}{%- endfor %}"
    "{%- if tools %}{{ tools | tojson }}{%- endif %}"
    "{%- if add_generation_prompt %}<assistant>{%- endif %}"
)


def byte_tokenizer(*special: str) -> Tokenizer:
    """Bytes as tokens, `<end>` as the end token, and a chat template that writes `<role>content` lines.

    Args:
        special: texts of further special tokens, from 257 on.
    """
    return Tokenizer(_backend(special), special_tokens={"eos_token": "<end>"}, chat_templates={"default": _TEMPLATE})


def save_byte_tokenizer(folder: Path) -> None:
    """Write the files of `byte_tokenizer` into a model's folder."""
    _backend().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<end>", "chat_template": _TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def _backend(special: Sequence[str] = ()) -> Backend:
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = Backend(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = ByteLevelDecoder()
    backend.add_special_tokens([AddedToken(text, special=True) for text in ("<end>", *special)])
    return backend


def _byte_characters() -> list[str]:
    """GPT-2's spelling of the 256 bytes: printable Latin-1 as itself, the others as characters from U+0100 on."""
    plain = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


__all__ = ["EOS", "byte_tokenizer", "save_byte_tokenizer"]
