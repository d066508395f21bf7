"""Recorded runs of kernels: what they repeat, what can't be recorded, and the runner that keeps them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.assemble import assemble
from engine.config.load import load_config
from engine.device import detect
from engine.engine import Engine
from engine.messages import Add
from engine.ops import kernels
from engine.sampling_params import SamplingParams

pytestmark = pytest.mark.skipif(kernels.missing(detect("cpu")) is not None, reason=str(kernels.missing(detect("cpu"))))

NO_PLAN = bytes(28 * 8)


def gated(tokens: Tensor, table: Tensor, norm: Tensor) -> Tensor:
    """Look up, norm with a residual, gate: what a layer does without its products."""
    from engine.ops.native import NativeOps

    ops, residual = NativeOps(2), table[tokens]
    seen = residual.clone()
    return ops.silu_mul(ops.add_rms_norm(seen, residual, norm, 1e-5))


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_tape_computes_with_what_stands_in_its_inputs(rows: int) -> None:
    from engine.ops.tape import TapeMemory, record

    draw = torch.Generator().manual_seed(rows)
    table, norm = torch.randn(50, 96, generator=draw).bfloat16(), torch.randn(96, generator=draw).bfloat16()
    first, second = (torch.randint(50, (rows,), generator=draw) for _ in range(2))
    with torch.inference_mode():
        tokens, memory = first.clone(), TapeMemory()
        result, tape = record(lambda: gated(tokens, table, norm), memory, 2)
        assert tape is not None
        assert torch.equal(result, gated(first, table, norm))
        other, _ = record(lambda: gated(second, table, norm), memory, 2)  # shares what the first only passed through
        assert torch.equal(result, gated(first, table, norm))
        tokens.copy_(second)
        tape.replay(NO_PLAN)
        assert torch.equal(result, gated(second, table, norm))
        assert torch.equal(result, other)


@pytest.mark.parametrize(
    "more",
    [lambda x: x + 1, lambda x: x.double(), lambda x: x.zero_(), lambda x: x.t().contiguous(), lambda x: x[:, [1, 0]]],
)
def test_a_run_that_does_more_is_computed_all_the_same(more: Callable[[Tensor], Tensor]) -> None:
    from engine.ops.tape import TapeMemory, record

    x = torch.randn(4, 6)
    with torch.inference_mode():
        result, tape = record(lambda: more(x.clone()), TapeMemory(), 1)
        assert torch.equal(result, more(x.clone()))
    assert tape is None


def test_memory_is_given_again_when_nobody_looks_at_it() -> None:
    from engine.ops.tape import TapeMemory

    memory = TapeMemory()
    kept = memory.take((4, 100), torch.float32)
    view, address = kept[1:], kept.data_ptr()
    del kept
    assert memory.take((4, 100), torch.float32).data_ptr() != address
    del view
    assert memory.take((4, 100), torch.float32).data_ptr() == address


@pytest.mark.parametrize("settings", [["quantization=packed"], ["quantization=int8", "speculator=ngram"]])
def test_taped_steps_give_the_tokens_of_plain_ones(
    settings: list[str], tiny_checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from engine import taped_runner

    prompts = [[1, 2, 3], [4, 5] * 9, [6], [7, 8, 9, 10] * 20]
    config = load_config(None, ["model.dtype=bfloat16", "device.kind=cpu", *settings]).config
    texts = []
    for most in (0, taped_runner.MOST_TOKENS):
        monkeypatch.setattr(taped_runner, "MOST_TOKENS", most)
        engine = assemble(config, tiny_checkpoint("LlamaForCausalLM")).engine
        texts.append(generate(engine, prompts))
        runner: Any = engine.executor._runner  # type: ignore[attr-defined]
        assert any(runner._seen.values()) == (most > 0)
        engine.close()
    assert texts[0] == texts[1]


def generate(engine: Engine, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Twelve tokens for each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add(Add(request_id=str(number), prompt=prompt, params=params))
    found: dict[str, list[int]] = {}
    while engine.has_work:
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
    assert {len(tokens) for tokens in found.values()} == {12}
    return found
