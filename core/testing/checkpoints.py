"""Tiny checkpoints in memory and on disk, so that suites need no model file and no network."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource

if TYPE_CHECKING:
    from transformers import PreTrainedModel

TINY: Final[Mapping[str, Any]] = {
    "vocab_size": 160,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "init_std": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # of mixtures of experts
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    # of latent attention
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
"""Sizes of the usual fields; a model is given those that its config has."""


class TensorWeights(WeightSource):
    """A checkpoint that is a dictionary of tensors."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(tensors)

    def names(self) -> Iterable[str]:
        return self.tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensor(name).shape)

    def origin(self, name: str) -> str:
        return "the checkpoint of the conformance kit"

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        tensor = self._tensor(name)
        return (tensor if rows is None else tensor[rows]).to(dtype).contiguous()

    def digest(self) -> str:
        return "tensors"

    def close(self) -> None:
        """Nothing is held open."""

    def _tensor(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise KeyError(f"{self.origin(name)} lacks tensor {name}")
        return self.tensors[name]


class PlainLinear(Linear):
    """y = x W^T + b, as it is written."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        self._weight, self._bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self._weight, self._bias)

    def weight_bytes(self) -> int:
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def dense(self) -> Tensor:
        return self._weight


class PlainQuantization(Quantization):
    """No quantization: what models are built with where a suite is about the model."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        weight, added = (
            torch.cat([source.get(name, self._dtype) for name in wanted]).to(device or "cpu") if wanted else None
            for wanted in (names, bias)
        )
        assert weight is not None, "a layer has a weight"
        return PlainLinear(weight, added)

    def head(self, embedding: Tensor) -> Linear:
        return PlainLinear(embedding, None)


class CountingQuantization(PlainQuantization):
    """Counts the layers that a model asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = 0

    def linear(
        self, source: WeightSource, names: Sequence[str], bias: Sequence[str] = (), device: torch.device | None = None
    ) -> Linear:
        self.layers += 1
        return super().linear(source, names, bias, device)


@cache
def tiny_model(architecture: str) -> PreTrainedModel | None:
    """A random decoder of transformers in float32; None if transformers has no such class or can't make a small one."""
    import transformers

    found = getattr(transformers, architecture, None)
    settings = getattr(found, "config_class", None)
    if found is None or settings is None:
        return None
    usual = settings()
    sizes = {name: size for name, size in TINY.items() if hasattr(usual, name)}
    if "kv_lora_rank" in sizes:
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]  # one latent row serves all
    torch.manual_seed(7)
    model: PreTrainedModel = found(settings(**sizes, attn_implementation="eager")).float().eval()
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1:  # norms of one and biases of zero would hide mistakes
            torch.nn.init.normal_(tensor, 1.0 if "norm" in name and "bias" not in name else 0.0, 0.2)
    return model


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder that transformers wrote, under the names that stand in its files.

    They are copies: a mapped tensor would take the process down once a check cuts its file short.
    """
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}


def tiny_config(model: PreTrainedModel) -> dict[str, Any]:
    """The model's `config.json`."""
    return model.config.to_dict() | {"architectures": [type(model).__name__], "dtype": "float32"}


__all__ = [
    "TINY",
    "CountingQuantization",
    "PlainQuantization",
    "TensorWeights",
    "read_tensors",
    "tiny_config",
    "tiny_model",
]
