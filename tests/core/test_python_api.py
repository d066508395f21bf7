"""`LLM` and `AsyncLLM` over a tiny random model: what they promise holds whatever the model says."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

from engine import LLM, AsyncLLM, SamplingParams, Structured
from engine.completion import Completion, RequestFailed
from engine.errors import ResourceError
from engine.messages import FinishReason
from engine.testing.tokenizer import save_byte_tokenizer

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_byte_tokenizer(folder)
    return [
        f"model.source=path:{folder}",
        "model.loader=dummy",
        "model.dtype=float32",
        "device.threads=1",
        "kv_cache.pages=64",
        "scheduler.max_running=4",
        "scheduler.max_waiting=2",
    ]


@pytest.fixture(scope="module")
def engine(settings: list[str]) -> Iterator[LLM]:
    with LLM(None, settings) as llm:
        yield llm


@pytest.fixture
def llm(engine: LLM) -> Iterator[LLM]:
    """The engine, which every test must leave empty."""
    yield engine
    while engine.engine.has_work:
        engine.engine.step()
    stats = engine.engine.scheduler.cache.stats()
    assert stats.free + stats.cached == 64
    engine.engine.scheduler.cache.check()


def one(llm: LLM, prompt: str) -> Completion:
    (made,) = llm.generate(prompt, GREEDY)
    return made


def test_a_prompt_is_text_token_ids_or_a_conversation(llm: LLM) -> None:
    text, ids, chat = llm.generate(["abc", [97, 98, 99], HI], GREEDY)
    assert text.token_ids == ids.token_ids
    assert text.finish_reason is FinishReason.LENGTH
    assert len(text.token_ids) == 8
    assert text.text == llm.tokenizer.decode(text.token_ids)
    assert chat.prompt_token_ids == list(b"<user>hi<assistant>")
    assert chat.token_ids == llm.chat(HI, GREEDY).token_ids == llm.generate(HI, GREEDY)[0].token_ids


def test_more_prompts_than_the_engine_can_queue(llm: LLM) -> None:
    prompts = [f"prompt {i}" for i in range(20)]  # 4 run, 2 wait
    together = llm.generate(prompts, GREEDY)
    assert [made.token_ids for made in together] == [one(llm, prompt).token_ids for prompt in prompts]


def test_a_stream_says_what_generate_says(llm: LLM) -> None:
    whole = one(llm, "abc")
    pieces = list(llm.stream("abc", GREEDY))
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [token for piece in pieces for token in piece.token_ids] == whole.token_ids
    assert len(pieces) > 2
    assert pieces[-1].finish_reason == "length"


def test_streams_may_be_read_in_turn_and_beside_others(llm: LLM) -> None:
    expected = [one(llm, prompt).token_ids for prompt in ("abc", "xyz")]
    streams = [llm.stream(prompt, GREEDY) for prompt in ("abc", "xyz")]
    got: list[list[int]] = [[], []]
    for pair in zip_longest(*streams):
        assert len(one(llm, "between").token_ids) == 8
        for tokens, piece in zip(got, pair, strict=True):
            tokens += piece.token_ids if piece else []
    assert got == expected


def test_a_closed_stream_is_forgotten(llm: LLM) -> None:
    stream = llm.stream("abc", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert not llm.engine.scheduler.requests


def test_a_stop_string_ends_the_text(llm: LLM) -> None:
    whole = one(llm, "abc")
    stop = whole.text[3:5]
    (made,) = llm.generate("abc", SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, stop=(stop,)))
    assert made.text == whole.text[: whole.text.index(stop)]
    assert made.finish_reason is FinishReason.STOP


def test_a_prompt_that_does_not_fit_is_refused_and_nothing_is_left(llm: LLM) -> None:
    with pytest.raises(RequestFailed, match="maximum context length is 256"):
        llm.generate(["fine", "x" * 300], GREEDY)
    with pytest.raises(RequestFailed, match="the prompt is empty"):
        list(llm.stream([], GREEDY))
    with pytest.raises(RequestFailed, match="the chat template"):
        llm.chat([{"role": "user"}], GREEDY, template="{{ raise_exception('no') }}")
    assert not llm.engine.scheduler.requests


def test_a_text_keeps_to_its_structure(llm: LLM) -> None:
    shape = Structured("regex", "[0-9]{3}-[ab]")
    made = llm.chat(HI, SamplingParams(temperature=1.0, seed=3, structured=shape))
    assert re.fullmatch("[0-9]{3}-[ab]", made.text)


def test_the_asynchronous_engine_says_the_same(llm: LLM, settings: list[str]) -> None:
    async def work() -> None:
        async with AsyncLLM(None, settings) as other:
            made = await asyncio.gather(*(other.generate(prompt, GREEDY) for prompt in ("abc", "xyz")))
            assert [m.token_ids for m in made] == [one(llm, prompt).token_ids for prompt in ("abc", "xyz")]
            assert (await other.chat(HI, GREEDY)).text == llm.chat(HI, GREEDY).text
            pieces = [piece async for piece in other.stream(HI, GREEDY)]
            assert "".join(piece.text for piece in pieces) == llm.chat(HI, GREEDY).text
            with pytest.raises(RequestFailed, match="maximum context length is 256"):
                await other.generate("x" * 300, GREEDY)
            stream = other.stream("abc", SamplingParams(max_tokens=200, ignore_eos=True))
            await anext(stream)
            await stream.aclose()
            while (await other.client.control("stats"))["running"]:
                await asyncio.sleep(0.01)

    asyncio.run(work())


def test_an_engine_that_can_not_start_says_why(tmp_path: Path) -> None:
    async def work() -> None:
        async with AsyncLLM(None, [f"model.source=path:{tmp_path}/none"]):
            pass

    with pytest.raises(ResourceError, match="none"):
        asyncio.run(work())
