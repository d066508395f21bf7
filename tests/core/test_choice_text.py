from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from engine.detokenizer import Detokenizer
from engine.messages import FinishReason, Output
from engine.parsing.think_tags import TaggedThoughts
from engine.sampling_params import SamplingParams
from engine.testing.client import scores
from engine.testing.tokenizer import EOS, byte_tokenizer
from engine.text import ChoiceText, Delta

TOKENIZER = byte_tokenizer()


def choice(**params: Any) -> ChoiceText:
    made = SamplingParams(**params)
    return ChoiceText(0, made, Detokenizer(TOKENIZER, made.skip_special_tokens), frozenset({EOS}))


def feed(text: ChoiceText, *pieces: list[int], reason: FinishReason = FinishReason.LENGTH, **last: Any) -> list[Delta]:
    """Feed outputs until the choice has ended; the last piece carries the finish reason."""
    deltas: list[Delta] = []
    for i, piece in enumerate(pieces):
        end = {"finish_reason": reason, **last} if i == len(pieces) - 1 else {}
        deltas.append(text.feed(Output("r", token_ids=piece, logprobs=scores(piece, 0), **end)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def whole(deltas: list[Delta]) -> str:
    return "".join(delta.text for delta in deltas)


def test_an_end_token_counts_but_is_no_text() -> None:
    (delta,) = feed(choice(skip_special_tokens=False), [*b"hi", EOS], reason=FinishReason.STOP)
    assert (delta.text, delta.token_ids, delta.finish_reason, delta.stop_reason) == ("hi", [*b"hi", EOS], "stop", None)
    assert len(delta.logprobs) == 2


def test_an_ignored_end_token_is_text_like_any_other() -> None:
    (delta,) = feed(choice(ignore_eos=True, skip_special_tokens=False), [*b"hi", EOS])
    assert (delta.text, delta.finish_reason) == ("hi<end>", "length")


def test_a_stop_token_is_named_and_no_text() -> None:
    (delta,) = feed(choice(stop_token_ids=(48,)), list(b"a0"), reason=FinishReason.STOP, stop_token=48)
    assert (delta.text, delta.stop_reason, len(delta.token_ids)) == ("a", 48, 2)


def test_tokens_after_a_stop_string_do_not_count() -> None:
    (delta,) = feed(choice(stop=("cd",)), list(b"abcdef"))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("ab", "stop", "cd")
    assert delta.token_ids == list(b"abcd")
    assert len(delta.logprobs) == 4


def test_the_stop_string_can_stay() -> None:
    assert whole(feed(choice(stop=("cd",), include_stop_str_in_output=True), list(b"abc"), list(b"def"))) == "abcd"


def test_min_tokens_come_before_any_stop_string() -> None:
    deltas = feed(choice(stop=("a",), min_tokens=3, max_tokens=9), *[[token] for token in b"aabab"])
    assert whole(deltas) == "aab"
    assert deltas[-1].finish_reason == "stop"


def test_no_tokens_asked_for_means_no_text_although_the_core_makes_one() -> None:
    (delta,) = feed(choice(max_tokens=0), [97])
    assert (delta.text, delta.token_ids, delta.logprobs, delta.finish_reason) == ("", [], [], "length")


@given(st.text(max_size=12), st.lists(st.integers(1, 5), max_size=12), st.text("héé😀", min_size=1, max_size=3))
def test_the_split_of_the_tokens_does_not_matter(text: str, sizes: list[int], stop: str) -> None:
    tokens = TOKENIZER.encode(text)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(tokens[start : start + size])
        start += size
    pieces.append(tokens[start:])
    at_once = feed(choice(stop=(stop,)), tokens)
    split = feed(choice(stop=(stop,)), *pieces)
    assert whole(split) == whole(at_once) == text.partition(stop)[0]
    assert split[-1].finish_reason == at_once[-1].finish_reason
    assert [token for delta in split for token in delta.token_ids] == at_once[0].token_ids


THOUGHTS = TaggedThoughts("<think>", "</think>")


@given(st.lists(st.integers(1, 9), min_size=1), st.sampled_from([(), ("\n\n",), ("One", "o.")]))
def test_thoughts_are_parted_off_before_stop_strings_are_looked_for(sizes: list[int], stop: tuple[str, ...]) -> None:
    raw, pieces, at = list(b"<think>One.\n\nTwo.</think>\n\nNo. One."), [], 0
    while at < len(raw):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(raw[at : at + size])
        at += size
    params = SamplingParams(stop=stop)
    text = ChoiceText(0, params, Detokenizer(TOKENIZER), frozenset({EOS}), THOUGHTS.parser(""))
    deltas = feed(text, *pieces)
    assert "".join(delta.reasoning for delta in deltas) == "One.\n\nTwo."
    assert whole(deltas) == {(): "No. One.", ("\n\n",): "No. One.", ("One", "o."): "N"}[stop]
    # From the token that completes the opening marker to the one that completes the closing one.
    assert sum(delta.reasoning_tokens for delta in deltas) == len("<think>One.\n\nTwo.</think>") - len("<think")
    assert deltas[-1].stop_reason == ("o." if stop == ("One", "o.") else None)
