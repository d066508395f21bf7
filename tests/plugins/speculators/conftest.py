"""Random draft heads in the public format, and tiny targets with the texts that transformers writes for them.

Imports are lazy: most tests need neither.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engine.plugins.speculators.eagle.module import EagleModule
    from engine.specs.speculator import DraftBatch, Drafted
    from engine.testing.parity import Case

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


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with what its model writes, and what the model thinks meanwhile."""

    case: Case
    tokens: Tensor  # int64 [T], prompt and output
    states: Tensor  # [T, layers + 1, hidden]: what enters each layer, and what enters the final norm
    final: Tensor  # [T, hidden], after the final norm


@dataclass(frozen=True, slots=True)
class Served:
    """A tiny target with a tokenizer, and the same model in transformers."""

    folder: Path
    texts: list[Text]
    model: nn.Module


def serve(folder: Path, twin: Path | None = None) -> Served:
    """Four prompts written on by transformers from `twin`, a dense folder of the same weights; adds a tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM

    from engine.testing.parity import Case
    from engine.testing.tokenizer import save_byte_tokenizer

    def written(prompt: list[int], count: int) -> Text:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        entering: list[Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda norm, args: entering.append(args[0]))
        found = model(torch.tensor([tokens]), output_hidden_states=True)
        hook.remove()
        *states, final = found.hidden_states
        case = Case(str(len(prompt)), prompt, tokens[len(prompt) :])
        return Text(case, torch.tensor(tokens), torch.stack([*states, entering[0]], 2)[0], final[0])

    save_byte_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(twin or folder, dtype=torch.float32, attn_implementation="eager")
    draw = random.Random(3)
    with torch.inference_mode():
        texts = [written([draw.randrange(160) for _ in range(length)], 16) for length in (5, 17, 33, 60)]
    return Served(folder, texts, model)


@pytest.fixture(scope="session")
def served(tiny: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    """A target by its name among the tiny ones."""
    made: dict[str, Served] = {}

    def make(name: str) -> Served:
        if name not in made:
            folder = tmp_path_factory.mktemp(name) / "model"
            shutil.copytree(tiny(name), folder)
            made[name] = serve(folder)
        return made[name]

    return make


@pytest.fixture
def served_from() -> Callable[..., Served]:
    """The same for a folder of one's own."""
    return serve


@dataclass(slots=True)
class Watch:
    """Stands between engine and resident: keeps the chains that were drafted, and replaces most of them by right ones
    of any length, so that whole, half and no drafts are accepted."""

    texts: list[Text]
    original: Callable[[Any, DraftBatch], Drafted]
    draw: random.Random = field(default_factory=lambda: random.Random(1))
    drafts: list[tuple[Text, int, list[int]]] = field(default_factory=list)
    """The text, where its newest token stood, and what was drafted."""

    def __call__(self, speculator: Any, batch: DraftBatch) -> Drafted:
        from engine.specs.speculator import Drafted

        drafted = self.original(speculator, batch)
        assert drafted.parents is None
        tokens = drafted.tokens.clone()
        for row, (token, at) in enumerate(zip(batch.tokens.tolist(), batch.positions.tolist(), strict=True)):
            known = [t for t in self.texts if at < len(t.tokens) and int(t.tokens[at]) == token]
            if len(known) != 1:
                continue
            self.drafts.append((known[0], at, tokens[row].tolist()))
            if self.draw.random() < 0.7:
                right = known[0].tokens[at + 1 : at + 1 + self.draw.randrange(tokens.shape[1] + 1)]
                tokens[row, : len(right)] = right
        return Drafted(tokens=tokens)


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, list[Text]], Watch]:
    """Watches all residents of a class draft for some texts."""

    def start(resident: Any, texts: list[Text]) -> Watch:
        it = Watch(texts, resident.draft)
        monkeypatch.setattr(resident, "draft", lambda self, batch: it(self, batch))
        return it

    return start
