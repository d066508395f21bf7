"""Prompts that can't fit are refused at a price that the context bounds, not the prompt."""

from __future__ import annotations

from typing import Any

import pytest

from engine.server.errors import ApiError
from engine.server.limits import check_length
from engine.testing.tokenizer import byte_tokenizer


class Counting:
    """A tokenizer of whole words that counts the characters it is given."""

    def __init__(self, longest_token: int = 10) -> None:
        self.longest_token = longest_token
        self.characters = 0

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        self.characters += len(text)
        return [0] * len(text.split())


def test_a_text_beyond_any_doubt_is_not_tokenized_at_all() -> None:
    tokenizer = Counting()
    with pytest.raises(ApiError, match=r"has 8000000 characters.* more than 800000 tokens.* is 8192 tokens") as refused:
        check_length(tokenizer, ["x" * 8_000_000], 8192)  # type: ignore[arg-type]
    assert tokenizer.characters == 0
    assert (refused.value.status, refused.value.param) == (400, "prompt")


def test_else_the_beginning_decides() -> None:
    tokenizer = Counting(longest_token=2000)
    with pytest.raises(ApiError, match="maximum context length is 8192 tokens"):
        check_length(tokenizer, ["ab " * 2_000_000], 8192)  # type: ignore[arg-type]
    assert tokenizer.characters == 8 * 8192


def test_a_text_that_may_fit_passes() -> None:
    tokenizer = Counting(longest_token=2000)
    check_length(tokenizer, ["short"], 8192)  # type: ignore[arg-type]
    assert tokenizer.characters == 0
    check_length(tokenizer, ["x" * 100_000], 8192)  # type: ignore[arg-type]  # one word, as far as one can see


def test_what_is_cut_at_the_end_of_the_beginning_refuses_nobody() -> None:
    """The last token of the beginning may be several that are one in the whole text."""
    tokenizer = Counting(longest_token=64)
    words = "abcdefg " * 8192  # 65,536 characters: 8192 tokens, the whole beginning
    with pytest.raises(ApiError):
        check_length(tokenizer, [words + "more " * 100_000], 8192 - 64 - 1)  # type: ignore[arg-type]
    check_length(tokenizer, [words + "x" * 60], 8192 - 64)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_megabytes_are_refused_by_the_routes(live: Any, path: str) -> None:
    text = "word " * 1_000_000
    live.state.tokenizer._backend = Refusing(live.state.tokenizer._backend)
    body = {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    error = live.error(live.http.post(path, json={"model": "tiny", **body}))
    assert "the maximum context length is 256 tokens" in error["message"]
    assert not live.core.calls


class Refusing:
    """A backend that may be asked about its vocabulary, but not to encode."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        assert name != "encode_batch"
        return getattr(self._backend, name)


def test_the_longest_token() -> None:
    tokenizer = byte_tokenizer()
    assert tokenizer.longest_token == max(len(tokenizer.token_text(i)) for i in range(tokenizer.vocab_size))


def test_too_many_messages_are_refused(serving: Any) -> None:
    live = serving(overrides=("server.max_messages=3",))
    messages = [{"role": "user", "content": "a"}] * 4
    for path in ("/v1/chat/completions", "/tokenize"):
        error = live.error(live.http.post(path, json={"model": "tiny", "messages": messages}))
        assert error["message"] == "messages may hold at most 3 messages, not 4"
        assert error["param"] == "messages"
    body = {"model": "tiny", "messages": messages[:3]}
    assert live.http.post("/v1/chat/completions", json=body).status_code == 200
