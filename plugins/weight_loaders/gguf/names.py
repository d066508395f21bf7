"""What GGUF calls the tensors of the Llama family, and what Hugging Face checkpoints call them."""

from __future__ import annotations

import re
from typing import Final

ARCHITECTURES: Final = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
"""`general.architecture` -> architecture; a `llama` with a sliding window is a MistralForCausalLM."""

_WHOLE: Final = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
ROPE_FACTORS: Final = "rope_freqs.weight"
"""Stretching of each rotary frequency, float32 [head_dim / 2]: configuration kept as a tensor."""


def hugging_face_name(name: str) -> str | None:
    """The checkpoint's name of a GGUF tensor; None for one that no model of the family reads."""
    if name in _WHOLE:
        return _WHOLE[name]
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
    if found is None or found[2] not in _IN_LAYER:
        return None
    return f"model.layers.{found[1]}.{_IN_LAYER[found[2]]}.{found[3]}"


def heads_interleaved(architecture: str, name: str) -> str | None:
    """Which head count ("heads" or "kv_heads") a tensor's rows are interleaved by, or None.

    In files of architecture `llama` the rows of each query and key head alternate between the two halves that rotate
    together; checkpoints, and the rotation used here, have the halves one after the other.
    """
    if architecture != "llama":
        return None
    return {"attn_q": "heads", "attn_k": "kv_heads"}.get(name.split(".")[-2])


__all__ = ["ARCHITECTURES", "ROPE_FACTORS", "heads_interleaved", "hugging_face_name"]
