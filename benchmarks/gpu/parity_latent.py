"""Law 1 on the GPU for latent attention: DeepSeek models with rows of 576 and random weights, against `transformers`.

    python benchmarks/gpu/parity_latent.py [--backends triton,flashmla] [--models v2,v3] [--batches 1,8]

In float32 every greedy token has to be that of transformers: prompts alone and together, graphs on and off, chunked or
not, in both caches. Kernels that know 16-bit rows only are compared in bfloat16: where a token differs, transformers'
own two likeliest tokens (float32) must be within `MARGIN` of each other.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from limits import versions

from engine import LLM, SamplingParams
from engine.testing.tokenizer import save_byte_tokenizer

SHARED: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 512,
    "intermediate_size": 768,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 4096,
    "initializer_range": 0.06,
    "moe_intermediate_size": 256,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "first_k_dense_replace": 1,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "v2": ("DeepseekV2", SHARED | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "v3": (
        "DeepseekV3",
        SHARED | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 192},
    ),
}
LENGTHS = (1, 5, 63, 64, 65, 200, 777, 1500)
TOKENS = 32
MARGIN = 0.15
MODES: tuple[list[str], ...] = (
    [],
    ["device.cuda_graphs=false"],
    ["kv_cache.use=paged", "scheduler.token_budget=256"],
)

Case = tuple[list[int], list[int], list[float]]  # prompt, greedy tokens, lead of each over the second likeliest


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--backends", default="triton,flashmla")
    arguments.add_argument("--models", default="v2,v3")
    arguments.add_argument("--batches", default="1,8")
    given = arguments.parse_args()
    print(versions(), flush=True)
    wrong = 0
    with tempfile.TemporaryDirectory() as root:
        for name in given.models.split(","):
            folder = Path(root) / name
            cases = make(name, folder)
            for backend in given.backends.split(","):
                for dtype in ("float32", "bfloat16") if backend == "triton" else ("bfloat16",):
                    for more in MODES:
                        settings = [f"attention={backend}", f"model.dtype={dtype}", *more]
                        wrong += compare(folder, cases, settings, [int(b) for b in given.batches.split(",")])
    return 1 if wrong else 0


def make(name: str, folder: Path) -> list[Case]:
    """Save a model of random weights, and let transformers answer."""
    family, fields = MODELS[name]
    torch.manual_seed(7)
    config = getattr(transformers, f"{family}Config")(**fields)
    getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(folder)
    save_byte_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").cuda()
    draw = random.Random(3)
    prompts = [[draw.randrange(512) for _ in range(length)] for length in LENGTHS]
    return [answered(model, prompt) for prompt in prompts]


@torch.inference_mode()
def answered(model: torch.nn.Module, prompt: Sequence[int]) -> Case:
    tokens, leads = list(prompt), []
    for _ in range(TOKENS):
        best = model(torch.tensor([tokens], device="cuda")).logits[0, -1].topk(2)
        tokens.append(int(best.indices[0]))
        leads.append(float(best.values[0] - best.values[1]))
    return list(prompt), tokens[len(prompt) :], leads


def compare(folder: Path, cases: Sequence[Case], settings: Sequence[str], batches: Sequence[int]) -> int:
    """How many answers differ where they must not."""
    base = [f"model.source=path:{folder}", "device.kind=cuda", "kv_cache.memory=2GiB", "grammar=none"]
    exact, wrong = "model.dtype=float32" in settings, 0
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    with LLM(overrides=[*base, *settings]) as llm:
        for batch in batches:
            equal, told = 0, 0
            for at in range(0, len(cases), batch):
                some = cases[at : at + batch]
                done = llm.generate([prompt for prompt, _, _ in some], params)
                for completion, (_, tokens, leads) in zip(done, some, strict=True):
                    got = completion.token_ids
                    first = next((i for i, (a, b) in enumerate(zip(got, tokens, strict=True)) if a != b), len(tokens))
                    equal, told = equal + first, told + len(tokens)
                    wrong += first < len(tokens) and (exact or leads[first] > MARGIN)
            print(
                f"{folder.name} {' '.join(settings)}, batch {batch}: {equal}/{told} tokens, {wrong} wrong", flush=True
            )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
