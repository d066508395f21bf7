"""Writes the config of Qwen2.5-7B's shape and a tokenizer that only has to be there, for `model.loader: dummy`.

python benchmarks/gpu/shape.py FOLDER [--context 140000]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def write(folder: Path, context: int = 32768) -> None:
    """Make the folder's two files; `context` is what the model says it was trained for."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "max_position_embeddings": context}))
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": words, "added_tokens": []}))


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("folder", type=Path)
    arguments.add_argument("--context", type=int, default=140_000)
    given = arguments.parse_args()
    write(given.folder, given.context)
