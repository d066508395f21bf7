"""Fields beyond the ordinary: scored prompts, the best of several, cut prompts, words that must not come, and gaps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from engine.messages import FinishReason, Output, TokenLogprobs
from engine.server.middle import FAMILIES
from engine.testing.client import Call
from engine.testing.tokenizer import EOS


def scored(call: Call) -> list[Output]:
    """Scores the prompt in two parts, then says `ok`."""
    entries = [TokenLogprobs([t, 65, 66, 67], [-3.0, -0.1, -0.2, -0.3], 9) for t in call.prompt[1:]]
    text = [TokenLogprobs([t, t], [-0.5, -0.5], 1) for t in b"ok"]
    return [
        Output("", prompt_logprobs=list(entries[:1])),
        Output("", prompt_logprobs=list(entries[1:]), token_ids=[*b"o"], logprobs=text[:1]),
        Output("", token_ids=[*b"k"], logprobs=text[1:], finish_reason=FinishReason.LENGTH),
    ]


def ranked(call: Call) -> list[Output]:
    """Says its number; the second choice is the likeliest, then the first."""
    number = int(call.request_id.rpartition("-")[2])
    value = [-1.0, -0.5, -2.0, -3.0][number % 4]
    word = f"{number}".encode()
    entries = [TokenLogprobs([t], [value], 1) for t in word]
    return [Output("", token_ids=[*word, EOS], logprobs=[*entries, entries[0]], finish_reason=FinishReason.STOP)]


def test_the_tokens_of_a_prompt_are_scored(serving: Callable[..., Any]) -> None:
    live = serving(scored)
    choice = live.complete("abc", prompt_logprobs=2).json()["choices"][0]
    assert live.core.calls[-1].params.prompt_logprobs == 2
    first, second, third = choice["prompt_logprobs"]
    assert first is None
    assert second == {
        "98": {"logprob": -3.0, "rank": 9, "decoded_token": "b"},
        "65": {"logprob": -0.1, "rank": 1, "decoded_token": "A"},
        "66": {"logprob": -0.2, "rank": 2, "decoded_token": "B"},
    }
    assert "99" in third
    assert choice["logprobs"] is None
    reply = live.chat("x", prompt_logprobs=0).json()
    assert reply["prompt_logprobs"][0] is None
    assert len(reply["prompt_logprobs"]) == reply["usage"]["prompt_tokens"]
    assert all(len(entry) == 1 for entry in reply["prompt_logprobs"][1:])


def test_an_echo_shows_no_more_alternatives_than_asked(serving: Callable[..., Any]) -> None:
    choice = serving(scored).complete("abc", echo=True, logprobs=1, prompt_logprobs=3).json()["choices"][0]
    assert [len(top) for top in choice["logprobs"]["top_logprobs"][1:3]] == [2, 2]
    assert [len(entry) for entry in choice["prompt_logprobs"][1:]] == [4, 4]


def test_the_best_of_several_are_shown(serving: Callable[..., Any]) -> None:
    live = serving(ranked)
    reply = live.complete(["a", "b"], n=2, best_of=4).json()
    assert [c["text"] for c in reply["choices"]] == ["1", "0", "5", "4"]
    assert [c["index"] for c in reply["choices"]] == [0, 1, 2, 3]
    assert all(c["logprobs"] is None for c in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 16
    assert len(live.core.calls) == 8
    assert live.complete("a", n=2, best_of=2).json()["choices"][0]["text"] == "0"


def test_prompts_are_cut_at_their_beginning(live: Any) -> None:
    reply = live.complete("abcdef", truncate_prompt_tokens=2, echo=True).json()
    assert live.core.calls[-1].prompt == list(b"ef")
    assert reply["choices"][0]["text"].startswith("ef")
    assert reply["usage"]["prompt_tokens"] == 2
    live.chat("abcdef", truncate_prompt_tokens=3)
    assert len(live.core.calls[-1].prompt) == 3
    context = live.core.ready.max_context
    live.complete("a" * (context + 50), truncate_prompt_tokens=-1, max_tokens=7)
    assert len(live.core.calls[-1].prompt) == context - 7


def test_bad_words_reach_the_core_as_tokens(live: Any) -> None:
    live.complete("a", bad_words=["no", " on"])
    ids = live.core.calls[-1].params.bad_word_ids
    assert ids == (tuple(b"no"), tuple(b" no"), tuple(b"on"), tuple(b" on"))


@pytest.mark.parametrize("marks", FAMILIES)
def test_a_suffix_is_put_around_the_gap(serving: Callable[..., Any], monkeypatch: Any, marks: Any) -> None:
    live = serving()
    known = {text: EOS for text in marks}
    monkeypatch.setattr(live.state.tokenizer, "special_among", lambda texts: frozenset(t for t in texts if t in known))
    live.complete("be", suffix="af")
    assert bytes(live.core.calls[-1].prompt).decode() == f"{marks.before}be{marks.after}af{marks.gap}"
    live.error(live.complete([1, 2], suffix="af"))
    live.error(live.complete("be", suffix="af", echo=True))


def test_without_the_tokens_for_it_a_suffix_is_refused(live: Any) -> None:
    error = live.error(live.complete("be", suffix="af"))
    assert error["param"] == "suffix"
    assert live.complete("be", suffix="").status_code == 200
