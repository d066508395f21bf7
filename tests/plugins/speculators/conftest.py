"""Random draft heads in the public format. Imported lazily: most tests need none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

    from engine.plugins.speculators.eagle.module import EagleModule

EAGLE3: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "vocab_size": 160,
    "draft_vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "use_aux_hidden_state": True},
}
EAGLE1: dict[str, Any] = {
    name: value for name, value in EAGLE3.items() if name not in ("draft_vocab_size", "eagle_config")
} | {"architectures": ["LlamaForCausalLM"], "bias": True}

MakeHead = Callable[..., "tuple[Path, EagleModule]"]


@pytest.fixture
def make_head(tmp_path: Path) -> MakeHead:
    """Writes a folder with a random head; returns it with the module whose weights it holds.

    `change` is given the file's tensors before they are written, to change them in place; `more` are fields of the
    config.
    """
    import torch
    from safetensors.torch import save_file

    from engine.plugins.speculators.eagle.module import EagleModule
    from engine.plugins.speculators.eagle.shape import read_shape

    def make(
        generation: str = "eagle3", change: Callable[[dict[str, Tensor]], None] | None = None, **more: Any
    ) -> tuple[Path, EagleModule]:
        config = {"eagle": EAGLE1, "eagle3": EAGLE3}[generation] | more
        torch.manual_seed(11)
        module = EagleModule(read_shape(config), 256)
        for name, tensor in module.named_parameters():
            with torch.no_grad():
                tensor.normal_(1.0 if "norm" in name else 0.0, 0.2)
        if module.shape.draft_vocab < module.shape.vocab:
            chosen = torch.randperm(module.shape.vocab)[: module.shape.draft_vocab]
            module.set_vocabulary(chosen.sort().values)
        folder = tmp_path / f"head{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        stored = {name: tensor.detach().clone() for name, tensor in module.state_dict().items()}
        if change:
            change(stored)
        save_file(stored, folder / "model.safetensors")
        return folder, module

    return make
