"""Log-probabilities in OpenAI's two shapes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from engine.messages import TokenLogprobs

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token as text; one that is only a piece of a character is shown by its bytes, as OpenAI does."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """`{"content": [{token, logprob, bytes, top_logprobs}]}`; the alternatives are the best, the choice not added."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": token_name(tokenizer, token), "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for entry in entries:
        (chosen, *others), (value, *values) = entry.token_ids, entry.logprobs
        top = [one(token, logprob) for token, logprob in zip(others, values, strict=True)]
        content.append({**one(chosen, value), "top_logprobs": top})
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Sequence[TokenLogprobs | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """For each token of a prompt, the token and the best `count` by id: `{logprob, rank, decoded_token}`.

    Args:
        entries: of all prompt tokens but the first, which has no probability.
    """

    def one(entry: TokenLogprobs) -> dict[str, dict[str, Any]]:
        ranks = [entry.rank, *range(1, len(entry.token_ids))]
        columns = zip(entry.token_ids, entry.logprobs, ranks, strict=True)
        return {
            str(t): {"logprob": _finite(v), "rank": rank, "decoded_token": tokenizer.token_text(t)}
            for t, v, rank in columns
        }

    return [None, *(one(entry) for entry in clipped(entries, count))]


def clipped(entries: Sequence[TokenLogprobs | None], count: int | None) -> list[TokenLogprobs]:
    """The entries with at most `count` alternatives each; a leading None is left out."""
    most = 1 + (count or 0)
    return [TokenLogprobs(e.token_ids[:most], e.logprobs[:most], e.rank) for e in entries if e is not None]


class CompletionLogprobs:
    """The parallel lists of /v1/completions for one choice, in pieces; knows how far into the text it is."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def piece(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any]:
        """`{tokens, token_logprobs, top_logprobs, text_offset}` of the next tokens; the choice is among the top."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            self._advance(lists, entry.token_ids[0])
            lists["token_logprobs"].append(_finite(entry.logprobs[0]))
            pairs = zip(entry.token_ids, entry.logprobs, strict=True)
            lists["top_logprobs"].append({token_name(self._tokenizer, t): _finite(v) for t, v in pairs})
        return lists

    def prompt(self, tokens: Sequence[int], entries: Sequence[TokenLogprobs | None]) -> dict[str, Any]:
        """The same for an echoed prompt, whose first token has no probability.

        Args:
            tokens: the prompt.
            entries: of all prompt tokens but the first, in order; a leading None is allowed.
        """
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        self._advance(lists, tokens[0])
        lists["token_logprobs"].append(None)
        lists["top_logprobs"].append(None)
        rest = self.piece([entry for entry in entries if entry is not None])
        return {name: values + rest[name] for name, values in lists.items()}

    def _advance(self, lists: dict[str, list[Any]], token: int) -> None:
        lists["tokens"].append(token_name(self._tokenizer, token))
        lists["text_offset"].append(self._offset)
        self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))


def _finite(logprob: float) -> float:
    """JSON has no infinity; what can't be (a banned token) is shown as OpenAI shows it."""
    return max(logprob, -9999.0)


__all__ = ["CompletionLogprobs", "chat_logprobs", "clipped", "prompt_logprobs", "token_name"]
