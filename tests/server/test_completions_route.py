from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.messages import FinishReason, Output
from engine.testing.client import Call, say, scores
from engine.testing.tokenizer import EOS

Chunks = Callable[[httpx.Response], list[dict[str, Any]]]


def test_an_answer_has_openais_shape(live: Any) -> None:
    reply = live.complete(max_tokens=3).json()
    assert (reply["object"], reply["model"]) == ("text_completion", "tiny")
    (choice,) = reply["choices"]
    assert (choice["text"], choice["finish_reason"], choice["logprobs"]) == ("hel", "length", None)
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (3, 3)


def test_sixteen_tokens_by_default(serving: Any) -> None:
    live = serving(say(list(b"ab")))
    assert live.complete().json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [("ab", [b"ab"]), (["ab", "c"], [b"ab", b"c"]), ([97, 98], [b"ab"]), ([[97], [98, 99]], [b"a", b"bc"])],
)
def test_all_four_kinds_of_prompt(live: Any, prompt: Any, expected: list[bytes]) -> None:
    reply = live.complete(prompt, max_tokens=2).json()
    assert [bytes(call.prompt) for call in live.core.calls] == expected
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(expected)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, expected))


def test_choices_of_one_prompt_stand_side_by_side(serving: Any) -> None:
    live = serving(lambda call: [Output("", token_ids=[call.prompt[0]], finish_reason=FinishReason.LENGTH)])
    reply = live.complete(["x", "y"], n=2, max_tokens=1).json()
    assert [choice["text"] for choice in reply["choices"]] == ["x", "x", "y", "y"]
    assert (reply["usage"]["prompt_tokens"], reply["usage"]["completion_tokens"]) == (2, 4)


def test_cached_tokens_are_those_of_each_prompts_first_choice(serving: Any) -> None:
    def script(call: Call) -> list[Output]:
        rest = Output("", token_ids=[66], finish_reason=FinishReason.LENGTH, cached_tokens=len(call.prompt))
        return [Output("", token_ids=[65], cached_tokens=len(call.prompt)), rest]

    live = serving(script)
    usage = live.complete(["abc", "de"], n=2, max_tokens=2).json()["usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 5}


@pytest.mark.parametrize("prompt", ["a\r\n b", [97, 255]])
def test_echo_comes_first_and_unchanged(live: Any, chunks: Chunks, prompt: Any) -> None:
    shown = prompt if isinstance(prompt, str) else "a\ufffd"
    assert live.complete(prompt, echo=True, max_tokens=2).json()["choices"][0]["text"] == shown + "he"
    streamed = chunks(live.complete(prompt, echo=True, max_tokens=2, stream=True))
    assert "".join(part["choices"][0]["text"] for part in streamed) == shown + "he"


def test_legacy_log_probabilities(live: Any) -> None:
    lists = live.complete(logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]
    assert lists["tokens"] == ["h", "e", "l"]
    assert lists["text_offset"] == [0, 1, 2]
    assert lists["token_logprobs"] == [-0.5] * 3
    assert lists["top_logprobs"][0] == {"h": -0.5, "A": -1.5}


def test_zero_alternatives_still_give_the_choices_own(live: Any) -> None:
    lists = live.complete(logprobs=0, max_tokens=2).json()["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [-0.5, -0.5]


def test_false_means_no_log_probabilities(live: Any) -> None:
    assert live.complete(logprobs=False, max_tokens=2).json()["choices"][0]["logprobs"] is None
    assert live.core.calls[0].params.logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_log_probabilities_scores_the_prompt(live: Any, chunks: Chunks, stream: bool) -> None:
    response = live.complete(logprobs=1, echo=True, max_tokens=1, stream=stream)
    choices = [part["choices"][0] for part in chunks(response)] if stream else response.json()["choices"]
    lists = choices[0]["logprobs"]
    assert lists["tokens"] == ["a", "b", "c", "h"]
    assert lists["token_logprobs"] == [None, -0.5, -0.5, -0.5]
    assert lists["text_offset"] == [0, 1, 2, 3]
    assert choices[0]["text"] == "abch"


def test_prompt_scores_may_come_in_pieces_and_with_a_leading_none(serving: Any) -> None:
    def script(call: Call) -> list[Output]:
        first, rest = call.prompt[1:2], call.prompt[2:]
        return [
            Output("", prompt_logprobs=[None, *(scores(first, 0) or [])]),
            Output("", prompt_logprobs=[*(scores(rest, 0) or [])]),
            Output("", token_ids=[104], logprobs=scores([104], 0), finish_reason=FinishReason.LENGTH),
        ]

    lists = serving(script).complete(logprobs=0, echo=True, max_tokens=1).json()["choices"][0]["logprobs"]
    assert lists["token_logprobs"] == [None, -0.5, -0.5, -0.5]


def test_no_tokens_at_all_score_a_prompt(live: Any) -> None:
    reply = live.complete(echo=True, logprobs=0, max_tokens=0).json()
    assert reply["choices"][0]["text"] == "abc"
    assert reply["choices"][0]["logprobs"]["tokens"] == ["a", "b", "c"]
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert live.core.calls[0].params.max_tokens == 1


def test_offsets_count_characters_also_when_a_token_is_half_of_one(serving: Any) -> None:
    live = serving(say(list("é!".encode()), eos=EOS))
    lists = live.complete(logprobs=0).json()["choices"][0]["logprobs"]
    assert lists["tokens"] == ["bytes:\\xc3", "bytes:\\xa9", "!"]
    assert lists["text_offset"] == [0, 0, 1]


def test_stream_with_usage(live: Any, chunks: Chunks) -> None:
    parts = chunks(live.complete(max_tokens=4, stream=True, stream_options={"include_usage": True}))
    assert "".join(c["text"] for part in parts for c in part["choices"]) == "hell"
    assert [c["finish_reason"] for part in parts for c in part["choices"]] == [None, None, None, "length"]
    assert parts[-1]["usage"]["total_tokens"] == 7


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(live: Any, chunks: Chunks, stream: bool) -> None:
    response = live.complete(return_token_ids=True, max_tokens=3, stream=stream)
    choices = [p["choices"][0] for p in chunks(response)] if stream else response.json()["choices"]
    assert [token for choice in choices for token in choice["token_ids"]] == list(b"hel")


def test_tokenize_and_back(live: Any) -> None:
    reply = live.http.post("/tokenize", json={"prompt": "a b", "return_token_strs": True}).json()
    assert reply == {"count": 3, "max_model_len": 256, "tokens": [97, 32, 98], "token_strs": ["a", " ", "b"]}
    chat = live.http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()
    assert bytes(chat["tokens"]) == b"<user>x<assistant>"
    assert live.http.post("/detokenize", json={"tokens": [97, 32]}).json() == {"prompt": "a "}
