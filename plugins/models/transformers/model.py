"""Any decoder of the transformers library, run through the engine's attention and KV cache."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging as reports

from engine.plugins.models.transformers.binding import NAME, Binding, register
from engine.specs.model import Forward, Model, ModelProfile
from engine.specs.weight_loader import WeightSource


class TransformersModel(Model):
    """One sequence of all tokens of a step, with explicit positions and without a mask.

    The body and the head of a causal model are used apart: the engine wants logits of a few rows only. The head keeps
    whatever the architecture does to its logits (scaling, soft-capping) by running with a body that returns its input.
    """

    def __init__(self, causal: PreTrainedModel, profile: ModelProfile, device: torch.device) -> None:
        self.profile = profile
        self._bytes = sum(tensor.nbytes for tensor in causal.parameters())
        self._body: PreTrainedModel = getattr(causal, causal.base_model_prefix)
        self._binding = Binding(self._body, profile)
        with torch.inference_mode():
            self._binding.check(self._body, device)
        setattr(causal, causal.base_model_prefix, _Echo())
        self._head = causal
        _tap(self._body, profile.layers, self._binding)

    def forward(self, tokens: Tensor, positions: Tensor, step: Forward) -> Tensor:
        self._binding.step = step
        found = self._body(input_ids=tokens[None], position_ids=positions[None], use_cache=False)
        return found.last_hidden_state[0]  # type: ignore[no-any-return]

    def logits(self, hidden: Tensor) -> Tensor:
        return self._head(inputs_embeds=hidden[None], use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def embed(self, tokens: Tensor) -> Tensor:
        return self._body.get_input_embeddings()(tokens)  # type: ignore[no-any-return]

    def weight_bytes(self) -> int:
        return self._bytes


class _Echo(nn.Module):
    """A body whose last hidden state is its input."""

    def forward(self, *args: Any, inputs_embeds: Tensor, **kwargs: Any) -> _Echoed:
        return _Echoed(inputs_embeds)


class _Echoed:
    """What a body returns, with nothing but the hidden state in it."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getitem__(self, index: Any) -> Any:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def _tap(body: nn.Module, layers: int, binding: Binding) -> None:
    """Show the state that enters each layer, and the one that leaves the last."""
    stack = next(x for x in body.modules() if isinstance(x, nn.ModuleList) and len(x) == layers)

    def show(index: int, hidden: Tensor) -> None:
        assert binding.step is not None, "set before the forward pass"
        binding.step.tap(index, hidden[0])

    for index, layer in enumerate(stack):
        layer.register_forward_pre_hook(lambda _, args, index=index: show(index, args[0]))
    stack[-1].register_forward_hook(lambda _, args, out: show(layers, out[0] if isinstance(out, tuple) else out))


def load(
    config: Mapping[str, Any],
    profile: ModelProfile,
    weights: WeightSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    trust_remote_code: bool,
) -> TransformersModel:
    """Read the weights and bind the model to the engine.

    Raises:
        ValueError: the architecture is unknown or can't be served, or a weight is missing or misshapen.
    """
    known = _config(config, trust_remote_code)
    auto: Any = AutoModelForCausalLM  # its methods carry no types
    with torch.device("meta"):
        skeleton: Any = auto.from_config(known, trust_remote_code=trust_remote_code)
    if not skeleton.is_backend_compatible():
        raise ValueError(
            f"{profile.architecture} does not use the attention interface of transformers, so the engine can't page "
            "its KV; it needs an implementation of its own"
        )
    register()
    causal = _filled(type(skeleton), known, _tensors(skeleton, weights, dtype), dtype, weights)
    return TransformersModel(causal.to(device).eval(), profile, device)


def _config(config: Mapping[str, Any], trust_remote_code: bool) -> PreTrainedConfig:
    fields = {key: value for key, value in config.items() if not key.startswith("_")}
    if "auto_map" in config:
        if not trust_remote_code:
            raise ValueError(
                "auto_map: the checkpoint brings its own code; to run it, set trust_remote_code in "
                "model.implementation.options"
            )
        known: PreTrainedConfig = AutoConfig.from_pretrained(config["_name_or_path"], trust_remote_code=True)
    else:
        kind = fields.pop("model_type", None)
        try:
            known = AutoConfig.for_model(kind, **fields)
        except StrictDataclassError as error:
            raise ValueError(f"config.json is malformed: {' '.join(str(error).split())}") from None
        except ValueError:
            raise ValueError(f"model_type {kind!r} is unknown to the installed transformers") from None
    return known


def _tensors(skeleton: nn.Module, weights: WeightSource, dtype: torch.dtype) -> dict[str, Tensor]:
    """All tensors of the checkpoint; one without names of its own (random weights) gives those of the model."""
    wanted = {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()}
    present = {name: weights.shape(name) for name in weights.names()} or wanted
    weights.expect({name: wanted.get(name, shape) for name, shape in present.items()})
    return {name: weights.get(name, dtype) for name in present}


def _filled(
    kind: Any,
    config: PreTrainedConfig,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    weights: WeightSource,
) -> Any:
    """A model of the checkpoint's weights; transformers renames and fuses them where an architecture asks for it."""
    with _silence():  # its report of missing weights is replaced by the error below
        causal, report = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype=dtype, attn_implementation=NAME, output_loading_info=True
        )
    if missing := sorted(report["missing_keys"]):
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"{weights.origin(missing[0])} lacks tensors: {', '.join(missing[:3])}{others}")
    return causal


@contextmanager
def _silence() -> Iterator[None]:
    """Keep transformers from writing reports and progress bars."""
    level, bars = reports.get_verbosity(), reports.is_progress_bar_enabled()
    reports.set_verbosity(logging.ERROR)
    bar: Any = reports  # its switches carry no types
    bar.disable_progress_bar()
    try:
        yield
    finally:
        reports.set_verbosity(level)
        if bars:
            bar.enable_progress_bar()


__all__ = ["TransformersModel", "load"]
