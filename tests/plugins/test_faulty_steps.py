"""Injected faults strike where their script says, and the engine confines them to the requests that they hit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import pytest

from engine import LLM, SamplingParams
from engine.completion import RequestFailed
from engine.errors import EngineError
from engine.faults import Trigger, When
from engine.messages import Add
from engine.plugins.attention import faulty as faulty_attention
from engine.plugins.executors import faulty as faulty_executor
from engine.testing.tokenizer import save_byte_tokenizer

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = ["one", "and two", "then three"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    save_byte_tokenizer(folder)
    pages = ["kv_cache=paged", "kv_cache.pages=64", "scheduler.max_running=4", "grammar=none"]
    return [f"model.source=path:{folder}", "model.loader=dummy", "model.dtype=float32", "device.threads=1", *pages]


def outcomes(settings: list[str], *script: str) -> list[list[int] | str]:
    """Token ids of every prompt, all computed together; or why one failed. The engine must be empty afterwards."""
    with LLM(None, [*settings, *script]) as llm:
        found: dict[str, list[int] | str] = {prompt: [] for prompt in PROMPTS}
        for prompt in PROMPTS:
            assert llm.engine.add(Add(prompt, llm.tokenizer.encode(prompt), GREEDY)) is None
        while llm.engine.has_work:
            for output in llm.engine.step():
                got = found[output.request_id]
                assert isinstance(got, list), "nothing comes after an end"
                found[output.request_id] = output.error or [*got, *output.token_ids]
        cache = llm.engine.scheduler.cache.stats()
        assert (cache.held, cache.free) == (0, 64)
        return list(found.values())


@pytest.fixture(scope="module")
def right(settings: list[str]) -> list[list[int] | str]:
    return outcomes(settings)


def test_triggers_count_occasions() -> None:
    def struck(when: When, occasions: int = 12) -> list[int]:
        trigger = Trigger(when)
        return [i for i in range(occasions) if trigger.fires()]

    assert struck(When()) == [0]
    assert struck(When(after=3, times=2)) == [3, 4]
    assert struck(When(after=9, times=None)) == [9, 10, 11]
    some = struck(When(times=None, share=0.3, seed=4), 400)
    assert 80 < len(some) < 160
    assert some == struck(When(times=None, share=0.3, seed=4), 400)
    assert some != struck(When(times=None, share=0.3, seed=5), 400)


def attention(fault: str) -> str:
    return f"attention={{use: faulty, options: {{inner: reference, faults: [{fault}]}}}}"


def executor(fault: str) -> str:
    return f"executor={{use: faulty, options: {{faults: [{fault}]}}}}"


NOT_FINITE = "the model computed values that are not finite for this request"


@pytest.mark.parametrize("fault", ["{kind: nan, layer: 1, after: 2}", "{kind: nan, layer: 0, after: 2}"])
def test_nan_in_a_layer_fails_one_request_alone(settings: list[str], right: list[list[int]], fault: str) -> None:
    found = outcomes(settings, attention(fault))
    assert found == [NOT_FINITE, *right[1:]]


def test_nan_for_everybody_fails_everybody_of_that_step(settings: list[str]) -> None:
    assert outcomes(settings, attention("{kind: nan, requests: all, after: 3}")) == [NOT_FINITE] * 3


def test_a_corrupt_layer_changes_a_text_but_no_neighbour(settings: list[str], right: list[list[int]]) -> None:
    found = outcomes(settings, attention("{kind: corrupt, layer: 1, times: null}"))
    assert found[0] != right[0]
    assert found[1:] == right[1:]


@pytest.mark.parametrize("part", [attention, executor])
def test_a_step_that_fails_ends_its_requests_and_no_more(
    settings: list[str], right: list[list[int]], part: Callable[[str], str]
) -> None:
    found = outcomes(settings, part("{kind: raise, after: 3}"))
    assert all(isinstance(one, str) and "injected fault" in one for one in found)
    with LLM(None, [*settings, part("{kind: raise, after: 2}")]) as llm:
        with pytest.raises(RequestFailed, match="injected fault"):
            llm.generate(PROMPTS[1], GREEDY)
        assert [c.token_ids for c in llm.generate(PROMPTS, GREEDY)] == right, "the next ones are served"


def test_a_row_that_counts_as_not_finite(settings: list[str], right: list[list[int]]) -> None:
    assert outcomes(settings, executor("{kind: nan, after: 2}")) == [NOT_FINITE, *right[1:]]


def test_a_wrong_token_is_told(settings: list[str], right: list[list[int]]) -> None:
    found = outcomes(settings, executor("{kind: corrupt, after: 1}"), "scheduler.overlap=false")
    assert isinstance(found[0], list)
    assert found[0][1] == right[0][1] - 1
    assert found[1:] == right[1:]


@pytest.mark.parametrize("part", [attention, executor])
def test_delays_change_no_text(settings: list[str], right: list[list[int]], part: Callable[[str], str]) -> None:
    assert outcomes(settings, part("{kind: delay, seconds: 0.01, times: null}")) == right


def test_several_faults_strike_at_once(settings: list[str], right: list[list[int]]) -> None:
    script = "{kind: delay, seconds: 0.01}, {kind: nan, after: 2}, {kind: nan, after: 4}"
    assert outcomes(settings, attention(script)) == [NOT_FINITE, NOT_FINITE, right[2]]


def test_a_kill_ends_the_process_at_once() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", "from engine.faults import kill; kill(); print('alive')"], check=False
    )
    assert ended.returncode == -signal.SIGKILL


def test_a_layer_that_the_model_lacks_is_named(settings: list[str]) -> None:
    with pytest.raises(EngineError, match="a fault names layer 7, but the model has 2: 0 to 1"):
        LLM(None, [*settings, attention("{kind: nan, layer: 7}")])


@pytest.mark.parametrize("module", [faulty_attention, faulty_executor])
def test_the_module_is_light(module: ModuleType) -> None:
    code = f"import sys, {module.__name__}; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
