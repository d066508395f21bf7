"""DeepSeek over paged rows, absorbed and expanded, however a prompt is cut: the logits of transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from engine.kv_memory import cut_pool
from engine.plugins.attention.reference.latent import ReferenceLatent
from engine.plugins.models import deepseek
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.runner import StepForward
from engine.specs.attention import AttentionBatch, AttentionShape
from engine.specs.model import Model, ModelProfile
from engine.specs.speculator import TargetTaps
from engine.testing.model import build_model

(OFFER,) = deepseek.models()
PAGE = 8
TEXT = [(37 * i * i + 11 * i) % 160 for i in range(128)]
MEMBERS = ["deepseek-v2", "deepseek-v3", "deepseek-v3-halves"]
CUTS = {"whole": (128,), "chunks": (50, 1, 7, 70), "long behind short": (5, 123)}


def shape_of(profile: ModelProfile, **changes: object) -> AttentionShape:
    return replace(AttentionShape.of(profile, "float32"), **changes)


def whole_batch(done: int, count: int) -> AttentionBatch:
    """One request's next tokens; its pages lie backwards."""
    index = torch.arange(done, done + count)
    table = torch.arange(-(-len(TEXT) // PAGE)).flip(0).int()
    return AttentionBatch(
        query_start=torch.tensor([0, count], dtype=torch.int32),
        seq_lens=torch.tensor([done + count], dtype=torch.int32),
        block_tables=table[None],
        slot_mapping=table[index // PAGE].long() * PAGE + index % PAGE,
        positions=index,
        num_decodes=int(count == 1),
        query_lens_host=np.array([count], dtype=np.int32),
        seq_lens_host=np.array([done + count], dtype=np.int32),
    )


@torch.inference_mode()
def logits(model: Model, shape: AttentionShape, cuts: Sequence[int]) -> Tensor:
    """Of every token, computed in chunks over one pool."""
    backend = ReferenceLatent(shape, PAGE)
    backend._most = 33  # rows of a round: no multiple of a page or a chunk
    pages = -(-len(TEXT) // PAGE)
    pool = cut_pool(backend.kv_layout(), len(shape.windows), pages, torch.device("cpu"))
    step, found, done = StepForward(backend, pool, TargetTaps()), [], 0
    for count in cuts:
        batch = whole_batch(done, count)
        step.plan = backend.plan(batch)
        assert bool(step.plan.rounds) == (shape.expanded is not None and count >= 70), count
        found.append(model.logits(model.forward(torch.tensor(TEXT[done : done + count]), batch.positions, step)))
        done += count
    return torch.cat(found)


@pytest.mark.parametrize("name", MEMBERS)
def test_both_forms_equal_transformers_however_a_prompt_is_cut(tiny: Callable[[str], Path], name: str) -> None:
    loader = SafetensorsLoader()
    config = loader.config(tiny(name))
    model = build_model(OFFER, None, config, loader.open(tiny(name), config))
    theirs = AutoModelForCausalLM.from_pretrained(tiny(name), dtype=torch.float32, attn_implementation="eager")
    with torch.inference_mode():
        want = theirs(torch.tensor([TEXT])).logits[0]
    tried = [({}, cuts) for cuts in CUTS] + [({"expanded": None}, "chunks")]
    for changes, cuts in tried:
        got = logits(model, shape_of(model.profile, **changes), CUTS[cuts])
        torch.testing.assert_close(got, want, rtol=0, atol=1e-4)
        assert torch.equal(got.argmax(-1), want.argmax(-1))
    packed = logits(model, shape_of(model.profile, packed=True), CUTS["chunks"])
    error = (packed - want).norm() / want.norm()
    assert 1e-4 < error < 0.2, "8 bits are near, and no more than near"


def test_bfloat16_differs_where_two_tokens_are_nearly_level(tiny: Callable[[str], Path]) -> None:
    """Rounding may choose other experts, so logits move far; the first token only gives way to a close second."""
    loader = SafetensorsLoader()
    config = loader.config(tiny("deepseek-v3"))
    exact, rounded = (
        build_model(OFFER, None, config, loader.open(tiny("deepseek-v3"), config), dtype)
        for dtype in (torch.float32, torch.bfloat16)
    )
    want = logits(exact, shape_of(exact.profile), CUTS["whole"])
    top = want.topk(2, -1).values
    margin = top[:, 0] - top[:, 1]
    for changes in ({}, {"expanded": None}):
        got = logits(rounded, shape_of(rounded.profile, dtype="bfloat16", **changes), CUTS["chunks"])
        other = got.argmax(-1) != want.argmax(-1)
        assert other.float().mean() < 0.15
        assert margin[other].max() < want.std() / 2
