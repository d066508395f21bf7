from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from engine.messages import FinishReason, Output
from engine.testing.client import Call, say
from engine.testing.tokenizer import EOS

Chunks = Callable[[httpx.Response], list[dict[str, Any]]]


def test_an_answer_has_openais_shape(live: Any) -> None:
    reply = live.chat(max_tokens=50).json()
    assert (reply["object"], reply["model"]) == ("chat.completion", "tiny")
    assert reply["id"].startswith("chatcmpl-")
    (choice,) = reply["choices"]
    assert choice["message"] == {"role": "assistant", "content": "hello world", "refusal": None}
    assert (choice["finish_reason"], choice["logprobs"], choice["index"]) == ("stop", None, 0)
    prompt = len("<user>hi\n<assistant>") - 1  # the template trims the line break
    usage = {"prompt_tokens": prompt, "completion_tokens": 12, "total_tokens": prompt + 12}
    assert reply["usage"] == {**usage, "prompt_tokens_details": {"cached_tokens": 0}}


def test_a_stream_says_the_same_in_pieces(live: Any, chunks: Chunks) -> None:
    response = live.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    parts = chunks(response)
    deltas = [choice["delta"] for part in parts for choice in part["choices"]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas) == "hello world"
    assert [c["finish_reason"] for p in parts for c in p["choices"] if c["finish_reason"]] == ["stop"]
    assert deltas[-1] == {}
    assert parts[-1]["choices"] == []
    assert parts[-1]["usage"]["completion_tokens"] == 12
    assert [part["usage"] for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert len({(part["id"], part["created"], part["model"], part["object"]) for part in parts}) == 1


def test_no_usage_unless_asked_for(live: Any, chunks: Chunks) -> None:
    for part in chunks(live.chat(stream=True)):
        assert "usage" not in part
        assert part["choices"]


def test_running_usage_in_every_chunk(live: Any, chunks: Chunks) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    counts = [part["usage"]["completion_tokens"] for part in chunks(live.chat(stream=True, stream_options=options))]
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_a_stop_string_over_several_tokens_never_shows(live: Any, chunks: Chunks) -> None:
    parts = chunks(live.chat(stream=True, stop=["lo wo"]))
    texts = [choice["delta"].get("content") for part in parts for choice in part["choices"]]
    assert [text for text in texts if text] == ["h", "e", "l"]
    assert parts[-1]["choices"][0]["stop_reason"] == "lo wo"
    whole = live.chat(stop="lo wo").json()
    assert whole["choices"][0]["message"]["content"] == "hel"
    assert whole["usage"]["completion_tokens"] == len("hello wo")
    assert len(live.core.aborted) == 2


def test_choices_differ_by_their_seeds_and_count_the_prompt_once(live: Any) -> None:
    reply = live.chat(n=3, seed=7).json()
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2]
    assert sorted(call.params.seed for call in live.core.calls) == [7, 8, 9]
    assert reply["usage"]["prompt_tokens"] == len(live.core.calls[0].prompt)
    assert reply["usage"]["completion_tokens"] == 36


def test_streamed_choices_are_interleaved_and_all_finish(live: Any, chunks: Chunks) -> None:
    texts = {0: "", 1: ""}
    finished = []
    for part in chunks(live.chat(n=2, stream=True)):
        for choice in part["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
            finished += [choice["index"]] if choice["finish_reason"] else []
    assert texts == {0: "hello world", 1: "hello world"}
    assert sorted(finished) == [0, 1]


def test_log_probabilities(live: Any, chunks: Chunks) -> None:
    content = live.chat(logprobs=True, top_logprobs=2, max_tokens=3).json()["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "hel"
    assert content[0]["bytes"] == [104]
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [-0.5, -1.5]
    parts = chunks(live.chat(logprobs=True, max_tokens=3, stream=True))
    streamed = [e for p in parts for c in p["choices"] if c["logprobs"] for e in c["logprobs"]["content"]]
    assert [entry["token"] for entry in streamed] == ["h", "e", "l"]
    assert all(entry["top_logprobs"] == [] for entry in streamed)


def test_a_character_in_pieces_is_shown_whole(serving: Any, chunks: Chunks) -> None:
    live = serving(say(list("a😀b".encode()), eos=EOS))
    texts = [c["delta"].get("content") for p in chunks(live.chat(stream=True)) for c in p["choices"]]
    assert [text for text in texts if text] == ["a", "😀", "b"]


def test_sampling_fields_reach_the_core(live: Any) -> None:
    fields = {"temperature": 0.5, "top_p": 0.9, "top_k": 10**30, "min_p": 0.1, "repetition_penalty": 1.2}
    live.chat(**fields, logit_bias={"5": 1}, stop_token_ids=[3], max_completion_tokens=4, max_tokens=9, priority=-3)
    (call,) = live.core.calls
    assert (call.params.temperature, call.params.top_p, call.params.min_p) == (0.5, 0.9, 0.1)
    assert (call.params.top_k, call.params.max_tokens, call.priority) == (257, 4, -3)
    assert (call.params.logit_bias, call.params.stop_token_ids) == ({5: 1.0}, (3,))


def test_without_max_tokens_the_context_is_the_limit(live: Any) -> None:
    live.chat()
    live.chat(max_tokens=10**30)
    room = 256 - len(live.core.calls[0].prompt)
    assert [call.params.max_tokens for call in live.core.calls] == [room, room]


def test_null_counts_as_not_sent(live: Any) -> None:
    names = ["temperature", "top_p", "n", "stop", "max_tokens", "logit_bias", "logprobs", "top_logprobs", "seed"]
    names += ["tools", "tool_choice", "response_format", "stream", "stream_options", "user", "cache_salt"]
    assert live.chat(**dict.fromkeys(names)).status_code == 200


def test_unknown_fields_are_accepted_and_named(live: Any) -> None:
    response = live.chat(user="me", **{"new_field": 1, "evil\r\nSet-Cookie: a=b": 2})
    assert response.status_code == 200
    assert response.headers["x-engine-ignored-fields"] == "user, new_field"
    assert "set-cookie" not in response.headers


def test_parts_of_text_are_joined(live: Any) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    live.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": parts}]})
    assert bytes(live.core.calls[0].prompt) == b"<user>a\nb<assistant>"


def test_tools_are_shown_to_the_model_unless_none_are_to_be_used(live: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    live.chat(tools=[tool])
    live.chat(tools=[tool], tool_choice="none")
    with_tools, without = (bytes(call.prompt) for call in live.core.calls)
    assert b'"name": "f"' in with_tools
    assert b'"name"' not in without


def test_history_with_tool_calls_gets_objects_for_arguments(live: Any) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    history = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "4"},
    ]
    assert live.http.post("/v1/chat/completions", json={"messages": history}).status_code == 200
    assert b'"arguments": {"a": 1}' in bytes(live.core.calls[0].prompt)


def test_the_last_message_can_be_continued(live: Any) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "The cat"}]
    body = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}
    live.http.post("/v1/chat/completions", json=body)
    assert bytes(live.core.calls[0].prompt) == b"<user>q<assistant>The cat"


def test_kv_transfer_parameters_pass_in_and_out(serving: Any, chunks: Chunks) -> None:
    handle = {"do_remote_prefill": True, "remote_engine_id": "p"}

    def script(call: Call) -> list[Output]:
        return [Output("", token_ids=[97], finish_reason=FinishReason.LENGTH, kv_transfer=handle, cached_tokens=5)]

    live = serving(script, overrides=("kv_connectors=[local]",))
    reply = live.chat(kv_transfer_params={"do_remote_decode": True}, max_tokens=1, cache_salt="s").json()
    assert reply["kv_transfer_params"] == handle
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 5}
    assert live.core.calls[0].kv_transfer == {"do_remote_decode": True}
    assert live.core.calls[0].cache_salt == "s"
    assert chunks(live.chat(stream=True, max_tokens=1))[-1]["kv_transfer_params"] == handle


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(live: Any, chunks: Chunks, stream: bool) -> None:
    response = live.chat(return_token_ids=True, max_tokens=3, stream=stream)
    if stream:
        ids = [token for p in chunks(response) for c in p["choices"] for token in c.get("token_ids", ())]
    else:
        ids = response.json()["choices"][0]["token_ids"]
        assert response.json()["prompt_token_ids"] == live.core.calls[0].prompt
    assert ids == list(b"hel")
