"""How byte-level vocabularies cut text before merging, by the name that a GGUF file gives in `tokenizer.ggml.pre`.

The patterns are properties of the models' published tokenizers. Each pattern is applied to what the one before it
left; every match stands by itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """One rule."""

    patterns: tuple[str, ...]
    nfc: bool = False  # text is composed (Unicode NFC) first
    ignore_merges: bool = False  # a cut that is a token as a whole stays whole


_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL: Final = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORD: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_UPPER: Final = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}"
_LOWER: Final = r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED: Final = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_DIGIT_BY_DIGIT: Final = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3: Final = PreTokenizer((rf"{_WORD}|\p{{N}}{{1,3}}|{_TAIL}",), ignore_merges=True)
_QWEN2: Final = PreTokenizer((rf"{_WORD}|\p{{N}}|{_TAIL}",), nfc=True)

PRE_TOKENIZERS: Final = {
    "gpt-2": PreTokenizer((_GPT2,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "smollm": _DIGIT_BY_DIGIT,
    "starcoder": _DIGIT_BY_DIGIT,
    "refact": _DIGIT_BY_DIGIT,
    "command-r": _DIGIT_BY_DIGIT,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
    "megrez": _QWEN2,
    "tekken": PreTokenizer((_CASED,), ignore_merges=True),
    "deepseek-coder": PreTokenizer(
        (r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", r"[一-龥ࠀ-一가-퟿]+", r"\p{N}"),
    ),
    "deepseek-v3": PreTokenizer(
        (
            r"\p{N}{1,3}",
            r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
        )
    ),
}
"""Rules by name; several names share one."""

__all__ = ["PRE_TOKENIZERS", "PreTokenizer"]
