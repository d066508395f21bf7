"""DeepSeek as a GPU runs it, its kernels and attention in Triton, against plain torch: interpreted where no GPU is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.batch import Admission, Entry, StepBatch
from engine.device import detect
from engine.kv_memory import cut_pool
from engine.ops import Ops
from engine.ops.reference import TorchOps
from engine.plugins.attention import reference, triton
from engine.plugins.models import deepseek
from engine.plugins.quantization import none
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.runner import Runner
from engine.sampling_params import SamplingParams
from engine.specs.attention import AttentionShape

pytest.importorskip("triton")

from engine.cuda.runner import CudaRunner
from engine.ops.triton_ops import TritonOps

DEVICE, PAGE = detect(), 4
PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7]]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """One layer of experts, of widths that the kernels take."""
    config = transformers.DeepseekV3Config(
        vocab_size=64,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.15,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        q_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=0,
        n_routed_experts=8,
        n_shared_experts=2,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
    )
    torch.manual_seed(0)
    transformers.DeepseekV3ForCausalLM(config).float().save_pretrained(tmp_path)
    return tmp_path


def make(kind: type[Runner], folder: Path, ops: Ops, attention: Any, **extra: Any) -> Runner:
    (offer,), (linears,), loader = deepseek.models(), none.quantizations(), SafetensorsLoader()
    device, config = torch.device(DEVICE.kind), loader.config(folder)
    profile = offer.profile(config)
    model = offer.build(
        offer.options(),
        config=config,
        profile=profile,
        weights=loader.open(folder, config),
        linears=linears.build(linears.options(), device=DEVICE, dtype=torch.float32),
        ops=ops,
        device=device,
        dtype=torch.float32,
    )
    shape = AttentionShape.of(profile, "float32")
    (kernel,) = attention.attention_backends()
    backend = kernel.build(kernel.options(), shape=shape, page_size=PAGE, device=DEVICE)
    pool = cut_pool(backend.kv_layout(), profile.layers, 32, device)
    return kind(model, backend, pool, page_size=PAGE, slots=2, max_len=40, device=device, **extra)


def entry(slot: int, start: int, count: int, *, samples: bool = True) -> Entry:
    """Slot s owns the pages 10 s + 1, …, and has learnt of those before `start`."""
    known = -(-start // PAGE)
    new = [10 * slot + 1 + page for page in range(known, -(-(start + count) // PAGE))]
    return Entry(slot=slot, start=start, count=count, samples=samples, first_page=known, new_pages=new)


def steps() -> list[StepBatch]:
    """Two prompts, one of them in chunks, then a decode of both."""
    greedy = SamplingParams(temperature=0.0)
    admitted = [
        Admission(slot=slot, tokens=prompt, prompt_len=len(prompt), params=greedy, seed=5, stop_ids=())
        for slot, prompt in enumerate(PROMPTS)
    ]
    return [
        StepBatch(number=1, admissions=admitted, entries=[entry(0, 0, 5), entry(1, 0, 4, samples=False)]),
        StepBatch(number=2, admissions=[], entries=[entry(0, 5, 1), entry(1, 4, 5)]),
        StepBatch(number=3, admissions=[], entries=[entry(0, 6, 1), entry(1, 9, 1)]),
    ]


def test_the_runner_of_a_gpu_writes_what_the_plain_one_writes(checkpoint: Path) -> None:
    plain = make(Runner, checkpoint, TorchOps(), reference)
    kernels = make(CudaRunner, checkpoint, TritonOps(), triton, token_budget=64, graphs=False)
    for batch in steps():
        want = [result.tokens for result in plain.step(batch).entries]
        assert [result.tokens for result in kernels.step(batch).entries] == want, f"step {batch.number}"
