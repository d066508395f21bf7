"""From the fields of a request to sampling parameters."""

from __future__ import annotations

import msgspec

from engine.sampling_params import SamplingParams
from engine.server.errors import ApiError, bad_request
from engine.server.protocol import Generate
from engine.server.structured import structured_output

_MAX_STOP_CHARACTERS = 4096
_MAX_BAD_WORDS = 128
_PLAIN = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "seed",
)


def sampling_params(
    body: Generate,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    vocab_size: int,
    max_stop: int,
) -> SamplingParams:
    """Collect and check everything that says how to sample.

    Raises:
        ApiError: 400, naming the field.
    """
    fields = {name: value for name in _PLAIN if (value := getattr(body, name)) is not None}
    if body.top_k is not None:
        fields["top_k"] = min(body.top_k, vocab_size)
    if body.allowed_token_ids is not None:
        fields["allowed_token_ids"] = _tokens("allowed_token_ids", body.allowed_token_ids, vocab_size)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            stop=_stop(body.stop, max_stop),
            stop_token_ids=_tokens("stop_token_ids", body.stop_token_ids or [], vocab_size),
            logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
            structured=structured_output(body),
            bad_words=_bad_words(body.bad_words or []),
            speculation=body.speculation,
            **fields,
        )
    except ValueError as error:
        name = str(error).partition(" ")[0]
        known = name.partition(".")[0] in SamplingParams.__struct_fields__
        raise bad_request(str(error), name if known else None) from None


def with_seed(params: SamplingParams, choice: int) -> SamplingParams:
    """The parameters of the choice of that number: the same but for the seed, so that choices differ."""
    if params.seed is None or choice == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + choice) % 2**64)


def _stop(stop: str | list[str] | None, max_stop: int) -> tuple[str, ...]:
    words = [stop] if isinstance(stop, str) else stop or []
    if len(words) > max_stop:
        raise bad_request(f"stop may hold at most {max_stop} strings, not {len(words)}", "stop")
    if any(len(word) > _MAX_STOP_CHARACTERS for word in words):
        raise bad_request(f"a string in stop may have at most {_MAX_STOP_CHARACTERS} characters", "stop")
    return tuple(words)


def _bad_words(words: list[str]) -> tuple[str, ...]:
    if len(words) > _MAX_BAD_WORDS:
        raise bad_request(f"bad_words may hold at most {_MAX_BAD_WORDS} texts, not {len(words)}", "bad_words")
    if any(len(word) > _MAX_STOP_CHARACTERS for word in words):
        raise bad_request(f"a text in bad_words may have at most {_MAX_STOP_CHARACTERS} characters", "bad_words")
    return tuple(words)


def _tokens(name: str, ids: list[int], vocab_size: int) -> tuple[int, ...]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise _outside(name, token, vocab_size)
    return tuple(ids)


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    found = {}
    for key, value in bias.items():
        if not (key.isascii() and key.removeprefix("-").isdigit() and len(key) < 20):
            raise bad_request(f"the keys of logit_bias must be token ids, not {key[:40]!r}", "logit_bias")
        if not 0 <= int(key) < vocab_size:
            raise _outside("logit_bias", int(key), vocab_size)
        found[int(key)] = value
    return found


def _outside(name: str, token: int, vocab_size: int) -> ApiError:
    return bad_request(f"{name} names token {token}, but the ids of this model go from 0 to {vocab_size - 1}", name)


__all__ = ["sampling_params", "with_seed"]
