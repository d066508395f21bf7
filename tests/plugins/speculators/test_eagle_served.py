"""An EAGLE head beside real tiny targets, through the whole engine: the text is the target's, and the drafts are those
that the differentiable module makes of the states that transformers computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import EngineError
from engine.llm import LLM
from engine.plugins.speculators.eagle.module import EagleModule, Unrolled
from engine.plugins.speculators.eagle.resident import EagleSpeculator
from engine.testing.parity import Build, ParityBench, Traffic

MakeHead = Callable[..., tuple[Path, EagleModule]]

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = ["model.dtype=float32", "kv_cache.page_size=8", "kv_cache.pages=128", "device.threads=1", "grammar=none"]
BASE += ["speculator.controller=false"]  # the drafts of a random head never pay
TRAFFIC = [Traffic(), Traffic(batch=4, preempt=True), Traffic(warm=True, batch=4)]


@torch.inference_mode()
def chain(module: EagleModule, embed: Any, text: Any, newest: int, steps: int) -> list[int]:
    """What the module drafts after position `newest` of a text."""
    layers = module.shape.hidden_layers(text.states.shape[1] - 1)
    states, attend = module.fuse(text.states[None, :newest, layers]), Unrolled()
    embeddings, drafted = embed(text.tokens[1 : newest + 1]), list[int]()
    for step in range(steps):
        states, out = module(embeddings[None], states, torch.arange(newest)[None] + step, attend)
        drafted.append(int(module.target_ids(module.logits(out[0, -1]).argmax())))
        embeddings = torch.cat((embeddings[1:], embed(torch.tensor(drafted[-1:]))))
    return drafted


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("llama", Build(cache="radix", speculator="eagle")),
        ("llama", Build(cache="paged", chunk=16, speculator="eagle")),
        ("deepseek-v3", Build(cache="radix", chunk=16, speculator="eagle")),
    ],
    ids=str,
)
def test_the_text_is_the_target_s_and_the_drafts_are_the_module_s(
    name: str,
    build: Build,
    served: Callable[[str], Any],
    make_head: MakeHead,
    watch: Callable[..., Any],
) -> None:
    target, (folder, module) = served(name), make_head(fc_norm=True, norm_output=build.cache == "radix")
    seen = watch(EagleSpeculator, target.texts)
    options = [f"model.source=path:{target.folder}", f"speculator.options.head=path:{folder}"]
    with ParityBench(build, [*BASE, *options]) as bench:
        for traffic in TRAFFIC:
            outcome = bench.run(traffic, [text.case for text in target.texts])
            assert not outcome.wrong, (traffic, outcome.wrong)
            assert outcome.drafted > 0
    assert len(seen.drafts) > 20
    for text, newest, drafted in seen.drafts:
        assert drafted == chain(module, target.model.get_input_embeddings(), text, newest, len(drafted)), (
            text.case.name,
            newest,
        )


@pytest.mark.parametrize("generation", ["eagle", "eagle3"])
def test_a_tree_leaves_the_text_as_it_is(generation: str, served: Callable[[str], Any], make_head: MakeHead) -> None:
    target, (folder, _) = served("llama"), make_head(generation)
    options = [f"model.source=path:{target.folder}", f"speculator.options.head=path:{folder}", "speculator.max_draft=6"]
    tree = ["speculator.options.tree.top_k=2", "speculator.options.tree.depth=3"]
    with ParityBench(Build(speculator="eagle"), [*BASE, *options, *tree]) as bench:
        for traffic in TRAFFIC[1:]:
            outcome = bench.run(traffic, [text.case for text in target.texts])
            assert not outcome.wrong, (traffic, outcome.wrong)
            assert outcome.drafted > 0


def without_a_norm(stored: dict[str, Any]) -> None:
    del stored["norm.weight"]


@pytest.mark.parametrize(
    ("change", "fields", "options", "told"),
    [
        (None, {"hidden_size": 128}, [], r"hidden size of 128, but this model .LlamaForCausalLM. has 64"),
        (without_a_norm, {}, [], "'eagle' can't be loaded: .*model.safetensors lacks tensor norm.weight"),
        (None, {}, ["head=path:/nowhere"], "head can't be followed: the source is 'path:/nowhere': no file or folder"),
        (None, {}, ["quantization=int3"], "no quantization named 'int3'"),
    ],
)
def test_a_head_that_does_not_fit_ends_the_start_with_a_sentence(
    change: Any,
    fields: dict[str, Any],
    options: list[str],
    told: str,
    served: Callable[[str], Any],
    make_head: MakeHead,
) -> None:
    folder, _ = make_head(change=change, **fields)
    given = [f"speculator.options.{option}" for option in (f"head=path:{folder}", *options)]
    with pytest.raises(EngineError, match=told):
        LLM(None, [*BASE, f"model.source=path:{served('llama').folder}", "speculator.use=eagle", *given])
