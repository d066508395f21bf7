"""Texts that are not to be generated, as the token sequences that would write them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from engine.sampling_params import SamplingParams

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def with_bad_words(params: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """The parameters with the tokens of their bad words: of each as it stands inside a word, and behind a blank.

    The last token of a sequence is banned where the output ends with those before it. A text that is cut into tokens
    in another way still gets through, as in every server with this field.
    """
    if not params.bad_words:
        return params
    spelled = [text for word in params.bad_words for text in (word.lstrip(), f" {word.lstrip()}")]
    found = dict.fromkeys(tuple(tokenizer.encode(text)) for text in spelled)
    return msgspec.structs.replace(params, bad_word_ids=(*params.bad_word_ids, *(ids for ids in found if ids)))


__all__ = ["with_bad_words"]
