"""Tiny random checkpoints, made with transformers once a session. Imported lazily: most tests need none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SMALL = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return SMALL | {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **fields}}


LONG = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + i for i in range(8)]}
STRETCHED = {"original_max_position_embeddings": 32, "factor": 4.0}

LATENT = SMALL | {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 24,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32}
SIGMOID = LATENT | {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "q_lora_rank": 20}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", SMALL),
    "llama-tied": ("Llama", SMALL | {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", SMALL | {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    "llama-linear": ("Llama", rope("linear", factor=2.0)),
    "llama-dynamic": ("Llama", rope("dynamic", factor=2.0)),
    "llama-llama3": ("Llama", rope("llama3", low_freq_factor=1.0, high_freq_factor=4.0, **STRETCHED)),
    "llama-yarn": ("Llama", rope("yarn", **STRETCHED)),
    "llama-yarn-scaled": ("Llama", rope("yarn", beta_fast=16.0, mscale=0.7, mscale_all_dim=0.5, **STRETCHED)),
    "llama-longrope": ("Llama", rope("longrope", **LONG, **STRETCHED)),
    "mistral": ("Mistral", SMALL | {"sliding_window": 16}),
    "mistral-unlimited": ("Mistral", SMALL | {"sliding_window": None, "head_dim": 24}),
    "qwen2": ("Qwen2", SMALL),
    "qwen2-windows": ("Qwen2", SMALL | {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1}),
    "qwen3": ("Qwen3", SMALL | {"head_dim": 32, "tie_word_embeddings": True}),
    "qwen3-biased": ("Qwen3", SMALL | {"head_dim": 16, "attention_bias": True}),
    "gemma2": ("Gemma2", SMALL | {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24}),
    "gpt-neox": ("GPTNeoX", {k: v for k, v in SMALL.items() if k != "num_key_value_heads"}),
    "phi": ("Phi", SMALL),
    "phi3": ("Phi3", SMALL | {"pad_token_id": 0, "sliding_window": 16}),
    "olmo2": ("Olmo2", SMALL),
    "qwen3-moe": (
        "Qwen3Moe",
        SMALL | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
    "qwen3-moe-mixed": (
        "Qwen3Moe",
        SMALL
        | {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"norm_topk_prob": True, "mlp_only_layers": [1], "tie_word_embeddings": True},
    ),
    "gpt2": (
        "GPT2",
        {"vocab_size": 160, "n_positions": 128, "n_embd": 64, "n_layer": 2, "n_head": 4, "initializer_range": 0.15},
    ),
    "stablelm": ("StableLm", SMALL),
    "deepseek-v2": ("DeepseekV2", LATENT | {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        LATENT
        | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "q_lora_rank": 20}
        | {"routed_scaling_factor": 16.0, "rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 0.7}},
    ),
    "deepseek-v3": ("DeepseekV3", SIGMOID | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}),
    "deepseek-v3-halves": ("DeepseekV3", SIGMOID | {"rope_interleave": False, "q_lora_rank": None}),
    "mamba": ("Mamba", {"vocab_size": 160, "hidden_size": 64, "num_hidden_layers": 2}),
}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a tiny model by its name in MODELS; made on first use."""
    import torch
    import transformers

    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            family, fields = MODELS[name]
            config = getattr(transformers, f"{family}Config")(**fields)
            torch.manual_seed(7)
            model = getattr(transformers, f"{family}{'LMHeadModel' if family == 'GPT2' else 'ForCausalLM'}")(config)
            for key, tensor in model.named_parameters():
                if tensor.dim() == 1:  # biases of zero and norms of one would hide mistakes
                    torch.nn.init.normal_(tensor, 1.0 if "norm" in key and "bias" not in key else 0.0, 0.2)
            made[name] = tmp_path_factory.mktemp(name)
            model.save_pretrained(made[name])
        return made[name]

    return make
