"""Multi-token prediction on a tiny DeepSeek-V3: the text is the target's, and the drafts are those of the formula in
plain float32, from a dense checkpoint and from one in FP8 blocks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import EngineError
from engine.llm import LLM
from engine.plugins.speculators import mtp
from engine.plugins.speculators.mtp.resident import MtpSpeculator
from engine.testing.parity import Build, ParityBench, Traffic
from engine.testing.speculator import SpeculatorConformance
from engine.testing.tokenizer import save_byte_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

BASE = ["model.dtype=float32", "kv_cache.page_size=8", "kv_cache.pages=128", "device.threads=1", "grammar=none"]
BASE += ["speculator.controller=false"]  # the drafts of a random head never pay
BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}


def spread(scales: Tensor, like: Tensor) -> Tensor:
    return scales.repeat_interleave(16, 0).repeat_interleave(16, 1)[: like.shape[0], : like.shape[1]]


def in_blocks(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A dense twin of what is left in `weights`: projections in FP8 with a scale per block, but for `eh_proj`."""
    dense = dict(weights)
    for name in [n for n in weights if n.endswith(("_proj.weight", "_with_mqa.weight")) and "eh_proj" not in n]:
        values = weights[name].float()
        rows, columns = (-(-size // 16) for size in values.shape)
        padded = torch.zeros(rows * 16, columns * 16)
        padded[: values.shape[0], : values.shape[1]] = values
        scales = padded.view(rows, 16, columns, 16).abs().amax((1, 3)).clamp_min(1e-12) / 448
        weights[name] = (values / spread(scales, values)).to(torch.float8_e4m3fn)
        weights[f"{name}_scale_inv"] = scales
        dense[name] = weights[name].float() * spread(scales, values)
    return dense


def with_module(old: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and weights of a tiny DeepSeek-V3 whose layer 3 is a copy of layer 2 behind the parts of a module."""
    weights, random = load_file(old / "model.safetensors"), torch.Generator().manual_seed(1)
    for name in [name for name in weights if name.startswith("model.layers.2.")]:
        weights[name.replace("layers.2.", "layers.3.")] = weights[name].clone()
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        weights[f"model.layers.3.{norm}.weight"] = 1 + 0.2 * torch.randn(64, generator=random)
    weights["model.layers.3.eh_proj.weight"] = 0.15 * torch.randn(64, 128, generator=random)
    weights = {name: value if value.dim() == 1 else value.bfloat16() for name, value in weights.items()}
    return json.loads((old / "config.json").read_text()) | {"num_nextn_predict_layers": 1}, weights


def write(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


class TestMtp(SpeculatorConformance):
    (offer,) = mtp.speculators()
    module = "engine.plugins.speculators.mtp"

    @pytest.fixture
    def target(self, tiny: Callable[[str], Path], tmp_path: Path) -> Path:
        write(tmp_path / "target", *with_module(tiny("deepseek-v3")))
        save_byte_tokenizer(tmp_path / "target")
        return tmp_path / "target"


@pytest.fixture(params=["bf16", "fp8"])
def target(
    request: pytest.FixtureRequest,
    tiny: Callable[[str], Path],
    tmp_path: Path,
    served_from: Callable[..., Any],
) -> Any:
    """The target in a folder, and its module's weights by their own names."""
    config, weights = with_module(tiny("deepseek-v3"))
    dense = in_blocks(weights) if request.param == "fp8" else weights
    packed = {"quantization_config": BLOCKS} if request.param == "fp8" else {}
    write(tmp_path / "model", config | packed, weights)
    write(tmp_path / "twin", config, dense)
    return served_from(tmp_path / "model", tmp_path / "twin"), {
        name.removeprefix("model.layers.3."): value.float() for name, value in dense.items() if "layers.3." in name
    }


def normed(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


@torch.inference_mode()
def chain(model: Any, own: dict[str, Tensor], text: Any, newest: int, steps: int) -> list[int]:
    """What the formula drafts after position `newest`: all pairs once more for each draft; layer 2 does for layer 3."""
    inner, states = model.model, text.final[:newest]
    tokens = text.tokens[1 : newest + 1].tolist()
    for _ in range(steps):
        embedded = normed(inner.embed_tokens(torch.tensor(tokens)), own["enorm.weight"])
        joined = torch.cat((embedded, normed(states, own["hnorm.weight"])), -1) @ own["eh_proj.weight"].T
        at, count = torch.arange(len(tokens))[None], len(tokens)
        made = inner.layers[2](
            joined[None],
            attention_mask=torch.full((1, 1, count, count), -torch.inf).triu(1),
            position_embeddings=inner.rotary_emb(joined[None], at),
            position_ids=at,
        )
        made = made[0] if isinstance(made, tuple) else made
        last = normed(made.view(count, -1)[-1:], own["shared_head.norm.weight"])
        tokens.append(int(model.lm_head(last).argmax()))
        states = torch.cat((states, last))
    return tokens[newest:]


def test_the_text_is_the_target_s_and_the_drafts_are_the_formula_s(target: Any, watch: Callable[..., Any]) -> None:
    it, own = target
    seen = watch(MtpSpeculator, it.texts)
    build = Build(cache="radix", chunk=16, speculator="mtp")
    with ParityBench(build, [*BASE, f"model.source=path:{it.folder}", "speculator.max_draft=3"]) as bench:
        for traffic in (Traffic(), Traffic(batch=4, preempt=True), Traffic(warm=True, batch=4)):
            outcome = bench.run(traffic, [text.case for text in it.texts])
            assert not outcome.wrong, (traffic, outcome.wrong)
            assert outcome.drafted > 0
    assert len(seen.drafts) > 20
    for text, newest, drafted in seen.drafts:
        assert drafted == chain(it.model, own, text, newest, len(drafted)), (text.case.name, newest)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama", "'mtp' can't draft for this model: this checkpoint .LlamaForCausalLM. has no module that predicts"),
        ("deepseek-v3", r"lacks tensor model\.layers\.3\.self_attn"),  # its config tells of one that was not saved
    ],
)
def test_a_checkpoint_without_a_module_ends_the_start_with_a_sentence(
    name: str, told: str, served: Callable[[str], Any]
) -> None:
    with pytest.raises(EngineError, match=told):
        LLM(None, [*BASE, f"model.source=path:{served(name).folder}", "speculator=mtp"])
